//! Inference on an NVIDIA GPU: weights packed for the GPU's kernels. One pass through the layers serves decoders,
//! encoders and models of images; their attention and what is before and behind the layers differ. Of decoders there is
//! a cache of keys and values of fixed size, and decoding by a captured CUDA graph.

mod attention;
mod block;
mod build;
mod cached;
mod decoder;
mod experts;
mod feed_forward;
mod hidden;
mod linear;
mod norm;
mod random;
mod session;
mod stack;
mod work;

use std::sync::Mutex;

use twofour_cuda::layer::DeviceBuffer;

pub(in crate::model) use self::{
    attention::FullAttention,
    block::CudaBlock,
    build::{Build, fused, repeatable},
    hidden::{download, first, upload},
    linear::{CudaLinear, Input},
    norm::CudaNorm,
    stack::{CudaStack, of_stack},
    work::Work,
};
pub use self::{random::CudaRandomWeights, session::CudaSession};
use crate::model::inference::rotation::Rotations;

/// A decoder's weights in the memory of a GPU, in f32, f16 or bf16: dense layers for cuBLASLt, 2:4 layers in that type,
/// in int8 or in int4 for the 2:4 kernels.
///
/// GEMMs run in the type, the residual stream and all sums are f32, and the cache of keys and values is of the type.
/// Queries, keys and values are one GEMM, and so are gate and up; where a
/// file has them in different forms they are multiplied dense. Inputs of int8 layers are quantized with a scale for
/// each token.
#[derive(Debug)]
pub struct CudaInference {
    stack: CudaStack,
    /// The embedding of each token; none where it is the head's weight.
    embedding: Option<DeviceBuffer>,
    /// What is added at each position, where positions are learned.
    learned: Option<DeviceBuffer>,
    norm: CudaNorm,
    head: CudaLinear,
    /// What embeddings are multiplied by, in the type to compute in.
    embedding_scale: Option<f32>,
    rotations: Option<Rotations>,
    /// Held while a session of [`Decoder`](crate::model::Decoder) uses the context's stream.
    busy: Mutex<()>,
}

of_stack!(CudaInference);

impl CudaInference {
    /// Bytes of the linear layers' weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.stack.weight_bytes() + self.head.bytes()
    }
}
