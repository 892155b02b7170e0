//! Rotary position embedding.

use candle_core::{CudaStorage, DType, Layout, Shape, Tensor, backend::BackendStorage as _};
use twofour_transformer::cuda::{Rotary, rotate, rotate_gradient};

use super::{
    CudaOperator, OnCuda, context,
    memory::{Locked, Output, read},
};
use crate::Result;

/// [`crate::ops::rope()`] for a CUDA tensor; shapes have been checked.
pub(crate) fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> candle_core::Result<Tensor> {
    let table = |t: &Tensor| t.detach().to_device(x.device())?.to_dtype(DType::F32)?.contiguous();
    x.contiguous()?.apply_op1(OnCuda(Rope { cos: table(cos)?, sin: table(sin)? }))
}

struct Rope {
    cos: Tensor,
    sin: Tensor,
}

/// Sequences, positions and elements of `[.., positions, d]`.
fn sides(shape: &Shape) -> (usize, usize, usize) {
    match shape.dims() {
        [sequences @ .., positions, d] => (sequences.iter().product(), *positions, *d),
        _ => (0, 0, 0),
    }
}

impl CudaOperator for Rope {
    const NAME: &'static str = "rope";

    fn forward(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let context = context::of(&x.device)?;
        let mut y = Output::new(&x.device, layout.shape(), x.dtype())?;
        {
            let (cos, sin) = (Locked::new("a table of cosines", &self.cos), Locked::new("a table of sines", &self.sin));
            let (cos, sin) = (cos.read(&context)?, sin.read(&context)?);
            let x = read("the input of a rotation", &context, x, layout)?;
            let rotary = Rotary { cos: cos.slice(), sin: sin.slice() };
            rotate(&context, sides(layout.shape()), rotary, x.slice(), y.write(&context)?.slice())?;
        }
        Ok(y.into_parts())
    }

    fn backward(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let device = context::device_of("the input of a rotation", x.device())?;
        let context = context::of(device)?;
        let dy = dy.contiguous()?;
        let mut dx = Output::new(device, x.shape(), x.dtype())?;
        {
            let (cos, sin) = (Locked::new("a table of cosines", &self.cos), Locked::new("a table of sines", &self.sin));
            let (cos, sin) = (cos.read(&context)?, sin.read(&context)?);
            let dy = Locked::new("the gradient of a rotation", &dy);
            let rotary = Rotary { cos: cos.slice(), sin: sin.slice() };
            let dy = dy.read(&context)?;
            rotate_gradient(&context, sides(x.shape()), rotary, dy.slice(), dx.write(&context)?.slice())?;
        }
        Ok(dx.into_tensor())
    }
}
