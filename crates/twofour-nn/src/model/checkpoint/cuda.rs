//! Decoders of checkpoints on an NVIDIA GPU.

use twofour::DataType;
use twofour_cuda::Device;

use super::Checkpoint;
#[cfg(doc)]
use crate::Error;
use crate::{
    Result,
    model::{CudaInference, inference::cuda::repeatable},
};

impl CudaInference {
    /// Reads a checkpoint's weights onto a device, to compute in `dtype`: f32, f16 or bf16. It times no GEMMs to choose
    /// among them, so that texts repeat bit for bit.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for heads of another size than 32, 64, 128 and 256, or a width above 8192; another type;
    /// those of [`Checkpoint::expect_head`], of reading and of the device's memory.
    pub fn of_checkpoint(device: &Device, checkpoint: &Checkpoint, dtype: DataType) -> Result<Self> {
        checkpoint.expect_head()?;
        Self::of_parts(repeatable(device)?, checkpoint.config(), &checkpoint.parts(), dtype)
    }
}

impl Checkpoint {
    /// [`Checkpoint::body`] on an NVIDIA GPU.
    pub(crate) fn body_on(&self, device: &Device, dtype: DataType) -> Result<CudaInference> {
        self.with_body(|config, parts| CudaInference::of_parts(repeatable(device)?, config, parts, dtype))
    }
}
