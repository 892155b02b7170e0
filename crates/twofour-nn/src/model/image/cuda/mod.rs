//! Image encoders on an NVIDIA GPU.

mod neck;
mod run;

use half::{bf16, f16};
use twofour::{DataType, kernel::KernelElement};
use twofour_cuda::{
    Device,
    layer::{DeviceBuffer, LayerContext},
};

use self::neck::CudaNeck;
pub use self::run::CudaImageBatch;
use super::{ImageWeights, TransformerConfig, embeddings::position_table, random::RandomParts};
use crate::{
    Result,
    model::{
        ImageCheckpoint, ModelOutput,
        float::match_float,
        inference::{
            cuda::{Build, CudaNorm, CudaStack, of_stack, repeatable},
            parts::Parts,
        },
    },
};

/// An image encoder's weights in the memory of a GPU, in f32, f16 or bf16: dense layers for cuBLASLt, 2:4 layers in
/// that type, in int8 or in int4 for the 2:4 kernels.
///
/// GEMMs and attention run in the type, the residual stream and all sums are f32. Inputs of int8 layers are quantized
/// with a scale for each token. The embedding of patches and the neck are dense. A head for classes stays out:
/// [`ImageEncoder::classify`](super::ImageEncoder::classify) of the same checkpoint scores the hidden states.
#[derive(Debug)]
pub struct CudaImageEncoder {
    stack: CudaStack,
    /// The embedding of patches, `[width, patch]`.
    patches: DeviceBuffer,
    /// What is added to the embedded patches of an image, f32 `[tokens, width]`.
    table: DeviceBuffer,
    end: CudaEnd,
}

/// What follows the last layer.
#[derive(Debug)]
enum CudaEnd {
    Norm(Box<CudaNorm>),
    Neck(Box<CudaNeck>),
}

impl CudaImageEncoder {
    /// Reads a checkpoint's weights onto a device, to compute in `dtype`: f32, f16 or bf16. It times no GEMMs to choose
    /// among them, so that results repeat bit for bit.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a width above 8192; another type; those of reading and of
    /// the device's memory.
    pub fn of_checkpoint(device: &Device, checkpoint: &ImageCheckpoint, dtype: DataType) -> Result<Self> {
        Self::of_parts(repeatable(device)?, checkpoint.config(), &checkpoint.parts(), dtype)
    }

    /// [`CudaImageEncoder::of_checkpoint`] with every linear layer dense: what a 2:4 encoder is compared with.
    ///
    /// # Errors
    /// Those of [`CudaImageEncoder::of_checkpoint`].
    pub fn dense_of_checkpoint(device: &Device, checkpoint: &ImageCheckpoint, dtype: DataType) -> Result<Self> {
        Self::of_parts(repeatable(device)?, checkpoint.config(), &checkpoint.parts().dense(), dtype)
    }

    /// The encoder that [`ImageEncoder::random`](super::ImageEncoder::random) makes of the same arguments, on the
    /// context's device. A context that measures chooses the fastest GEMMs.
    ///
    /// # Errors
    /// Those of [`TransformerConfig::validate`] and of [`CudaImageEncoder::of_checkpoint`].
    pub fn random(
        context: LayerContext,
        config: &TransformerConfig,
        weights: ImageWeights,
        dtype: DataType,
        seed: u64,
    ) -> Result<Self> {
        Self::of_parts(context, config, &RandomParts { config, weights, seed }, dtype)
    }

    fn of_parts(
        context: LayerContext,
        config: &TransformerConfig,
        parts: &(impl Parts<f32> + Parts<bf16> + Parts<f16>),
        dtype: DataType,
    ) -> Result<Self> {
        match_float!(dtype, |T| Self::build::<T>(context, config, parts))
    }

    fn build<T: KernelElement>(
        context: LayerContext,
        config: &TransformerConfig,
        parts: &impl Parts<T>,
    ) -> Result<Self> {
        let build = Build::new(context, config, parts)?;
        Ok(CudaImageEncoder {
            patches: build.matrix(&parts.vector("patch.weight", config.width * config.image()?.patch_len())?)?,
            table: build.floats(&position_table(config, parts)?)?,
            end: match config.output {
                ModelOutput::Hidden { .. } | ModelOutput::Vocabulary { .. } => {
                    CudaEnd::Norm(Box::new(build.last_norm()?))
                }
                ModelOutput::Neck { channels } => {
                    CudaEnd::Neck(Box::new(CudaNeck::build(&build, parts, (config.width, channels))?))
                }
            },
            stack: build.stack()?,
        })
    }

    /// Bytes of the layers' linear weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.stack.weight_bytes()
    }
}

of_stack!(CudaImageEncoder);
