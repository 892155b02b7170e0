//! Inference on an NVIDIA GPU: weights packed for the GPU's kernels, a cache of keys and values of fixed size, and
//! decoding by a captured CUDA graph.

pub(in crate::model) mod build;
mod decoder;
pub(in crate::model) mod hidden;
pub(in crate::model) mod linear;
mod random;
mod session;
mod work;

use std::sync::Mutex;

use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, LayerContext};
use twofour_transformer::cuda::NormKind as CudaNormKind;

pub(in crate::model) use self::linear::CudaLinear;
pub use self::{random::CudaRandomWeights, session::CudaSession};
use crate::model::{
    config::{NormKind, TransformerConfig},
    inference::rotation::Rotations,
};

/// A decoder's weights in the memory of a GPU, in f32, f16 or bf16: dense layers for cuBLASLt, 2:4 layers in that type,
/// in int8 or in int4 for the 2:4 kernels.
///
/// GEMMs run in the type, the residual stream and all sums are f32, and the cache of keys and values is of the type.
/// Queries, keys and values are one GEMM, and so are gate and up; where a
/// file has them in different forms they are multiplied dense. Inputs of int8 layers are quantized with a scale for
/// each token.
#[derive(Debug)]
pub struct CudaInference {
    context: LayerContext,
    config: TransformerConfig,
    dtype: DataType,
    /// The embedding of each token; none where it is the head's weight.
    embedding: Option<DeviceBuffer>,
    /// What is added at each position, where positions are learned.
    learned: Option<DeviceBuffer>,
    layers: Vec<CudaLayer>,
    norm: CudaNorm,
    head: CudaLinear,
    /// What embeddings are multiplied by, in the type to compute in.
    embedding_scale: Option<f32>,
    rotations: Option<Rotations>,
    /// Held while a session of [`Decoder`](crate::model::Decoder) uses the context's stream.
    busy: Mutex<()>,
}

/// Attention and feed-forward block.
#[derive(Debug)]
struct CudaLayer {
    attention_norm: CudaNorm,
    /// The norm of attention's output, where it has one.
    attention_post_norm: Option<CudaNorm>,
    qkv: CudaLinear,
    /// Gains of queries and of keys.
    head_norms: Option<[DeviceBuffer; 2]>,
    out: CudaLinear,
    feed_forward_norm: CudaNorm,
    feed_forward_post_norm: Option<CudaNorm>,
    up: CudaLinear,
    down: CudaLinear,
}

/// A norm with its parameters, f32.
#[derive(Debug)]
pub(in crate::model) struct CudaNorm {
    pub(in crate::model) gain: DeviceBuffer,
    pub(in crate::model) bias: Option<DeviceBuffer>,
}

impl CudaInference {
    /// The model's description.
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

    /// Bytes of the linear layers' weights on the device.
    pub fn weight_bytes(&self) -> usize {
        let layer = |l: &CudaLayer| l.qkv.bytes() + l.out.bytes() + l.up.bytes() + l.down.bytes();
        self.layers.iter().map(layer).sum::<usize>() + self.head.bytes()
    }

    fn norm_kind(&self) -> CudaNormKind {
        match self.config.norm.kind {
            NormKind::Layer => CudaNormKind::Layer,
            NormKind::RootMeanSquare => CudaNormKind::RootMeanSquare,
        }
    }
}
