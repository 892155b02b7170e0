//! Image encoders on an NVIDIA GPU.

mod build;
mod layer;
mod neck;
mod run;
mod work;

use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, LayerContext};

pub use self::run::CudaImageBatch;
use self::{layer::CudaImageLayer, neck::CudaNeck};
use super::TransformerConfig;
use crate::model::inference::cuda::CudaNorm;

/// An image encoder's weights in the memory of a GPU, in f32, f16 or bf16: dense layers for cuBLASLt, 2:4 layers in
/// that type, in int8 or in int4 for the 2:4 kernels.
///
/// GEMMs and attention run in the type, the residual stream and all sums are f32. Inputs of int8 layers are quantized
/// with a scale for each token. The embedding of patches and the neck are dense. A head for classes stays out:
/// [`ImageEncoder::classify`](super::ImageEncoder::classify) of the same checkpoint scores the hidden states.
#[derive(Debug)]
pub struct CudaImageEncoder {
    context: LayerContext,
    config: TransformerConfig,
    dtype: DataType,
    /// The embedding of patches, `[width, patch]`.
    patches: DeviceBuffer,
    /// What is added to the embedded patches of an image, f32 `[tokens, width]`.
    table: DeviceBuffer,
    layers: Vec<CudaImageLayer>,
    end: CudaEnd,
}

/// What follows the last layer.
#[derive(Debug)]
enum CudaEnd {
    Norm(Box<CudaNorm>),
    Neck(Box<CudaNeck>),
}

impl CudaImageEncoder {
    /// The encoder's description.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// The type that it computes in.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// The context that work is launched on.
    pub fn context(&self) -> &LayerContext {
        &self.context
    }

    /// Bytes of the layers' linear weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.layers.iter().map(CudaImageLayer::bytes).sum()
    }
}
