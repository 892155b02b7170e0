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

use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor};

use crate::Result;
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

/// An operator of one tensor, with its gradient.
trait CudaOperator: Send + Sync {
    /// Its name in candle's errors.
    const NAME: &'static str;

    fn forward(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)>;

    /// The gradient of `x` from that of the result `y`.
    fn backward(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Tensor>;
}

/// The same on candle's tape.
struct OnCuda<O>(O);

impl<O: CudaOperator> CustomOp1 for OnCuda<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        not_on_the_cpu(O::NAME)
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok(self.0.forward(x, layout)?)
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.backward(x, y, dy)?))
    }
}
