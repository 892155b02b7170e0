//! The operators of this crate on CUDA tensors: kernels of [`twofour_cuda`] on candle's memory and on candle's stream.
//!
//! Nothing is decided here: methods are in [`twofour_cuda::layer`] and [`twofour_transformer::cuda`]. An operator reads
//! the memory of its arguments ([`memory`]), allocates its result with candle, and launches on the stream of the
//! tensors' [`CudaDevice`](candle_core::CudaDevice) ([`context`]).

mod activation;
pub(crate) mod adamw;
mod context;
mod cross_entropy;
pub(crate) mod linear;
mod memory;
mod norm;
mod rope;
mod softmax;
pub(crate) mod sparse_activation;

pub(crate) use activation::activate;
pub(crate) use cross_entropy::cross_entropy;
pub(crate) use norm::{layer_norm, rms_norm};
pub(crate) use rope::rope;
pub(crate) use softmax::softmax;

/// The error of an operator whose arguments are on the CPU: the functions of [`crate::ops`] choose another one for
/// them.
fn not_on_the_cpu<T>(name: &'static str) -> candle_core::Result<T> {
    candle_core::bail!("{name}: this operator runs on CUDA tensors")
}
