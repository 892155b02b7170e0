//! Encoders of checkpoints.

use twofour::{DataType, file::StoredElement, kernel::KernelElement};

use super::{Encoder, HiddenStates};
#[cfg(doc)]
use crate::model::CheckpointError;
use crate::{
    Result,
    model::{EncoderCheckpoint, float::match_float},
};

impl EncoderCheckpoint {
    /// Reads and packs the weights for inference on the CPU. Weights that are compressed, and dense ones that are 2:4,
    /// go to the 2:4 kernels.
    ///
    /// # Errors
    /// [`CheckpointError::DType`]; those of reading and packing.
    pub fn inference<T: KernelElement + StoredElement>(&self) -> Result<Encoder<T>> {
        Encoder::build(self.config().clone(), &self.parts())
    }

    /// [`EncoderCheckpoint::inference`] in f32, bf16 or f16.
    pub(crate) fn hidden_states(&self, dtype: DataType) -> Result<Box<dyn HiddenStates>> {
        match_float!(dtype, |T| Ok(Box::new(self.inference::<T>()?)))
    }

    /// [`EncoderCheckpoint::inference`] with every linear layer for the dense kernel, in `T`: what a 2:4 encoder is
    /// compared with.
    ///
    /// # Errors
    /// Those of [`EncoderCheckpoint::inference`].
    pub fn dense_inference<T: KernelElement + StoredElement>(&self) -> Result<Encoder<T>> {
        Encoder::build(self.config().clone(), &self.parts().dense())
    }
}
