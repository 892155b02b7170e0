//! Image encoders of checkpoints.

use twofour::{file::StoredElement, kernel::KernelElement};

use super::ImageEncoder;
#[cfg(doc)]
use crate::model::CheckpointError;
use crate::{Result, model::ImageCheckpoint};

impl ImageCheckpoint {
    /// Reads and packs the weights for inference on the CPU. Weights that are compressed, and dense ones that are 2:4,
    /// go to the 2:4 kernels.
    ///
    /// # Errors
    /// [`CheckpointError::DType`]; those of reading and packing.
    pub fn inference<T: KernelElement + StoredElement>(&self) -> Result<ImageEncoder<T>> {
        ImageEncoder::build(self.config().clone(), &self.parts())
    }

    /// [`ImageCheckpoint::inference`] with every linear layer for the dense kernel, in `T`: what a 2:4 encoder is
    /// compared with.
    ///
    /// # Errors
    /// Those of [`ImageCheckpoint::inference`].
    pub fn dense_inference<T: KernelElement + StoredElement>(&self) -> Result<ImageEncoder<T>> {
        ImageEncoder::build(self.config().clone(), &self.parts().dense())
    }
}
