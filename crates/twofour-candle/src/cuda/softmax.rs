//! Softmax over the last dimension, in f32.

use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Shape, Tensor};
use twofour_transformer::cuda as transformer;

use super::{
    context,
    memory::{Locked, Output, matrix, read},
    not_on_the_cpu,
};
use crate::Result;

/// [`crate::ops::softmax()`] for a CUDA tensor.
pub(crate) fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    x.to_dtype(DType::F32)?.contiguous()?.apply_op1(Softmax)?.to_dtype(x.dtype())
}

struct Softmax;

impl Softmax {
    fn forward(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let context = context::of(&x.device)?;
        let mut y = Output::new(&x.device, layout.shape(), DType::F32)?;
        {
            let x = read("the input of a softmax", &context, x, layout)?;
            transformer::softmax(&context, matrix(layout.shape()), x.slice(), y.write(&context)?.slice())?;
        }
        Ok(y.into_parts())
    }

    fn backward(&self, y: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let device = context::device_of("a softmax", y.device())?;
        let context = context::of(device)?;
        let dy = dy.contiguous()?;
        let mut dx = Output::new(device, y.shape(), DType::F32)?;
        {
            let (y, dy) = (Locked::new("a softmax", y), Locked::new("the gradient of a softmax", &dy));
            let shape = matrix(dx.shape());
            let mut dx = dx.write(&context)?;
            transformer::copy(&context, y.read(&context)?.slice(), dx.slice())?;
            transformer::softmax_gradient(&context, shape, dy.read(&context)?.slice(), dx.slice())?;
        }
        Ok(dx.into_tensor())
    }
}

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        not_on_the_cpu("softmax")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok(self.forward(x, layout)?)
    }

    fn bwd(&self, _: &Tensor, y: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.backward(y, dy)?))
    }
}
