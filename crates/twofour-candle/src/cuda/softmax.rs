//! Softmax over the last dimension, in f32.

use candle_core::{CudaStorage, DType, Layout, Shape, Tensor};
use twofour_transformer::cuda as transformer;

use super::{
    CudaOperator, OnCuda, context,
    memory::{Locked, Output, matrix, read},
};
use crate::Result;

/// [`crate::ops::softmax()`] for a CUDA tensor.
pub(crate) fn softmax(x: &Tensor) -> candle_core::Result<Tensor> {
    x.to_dtype(DType::F32)?.contiguous()?.apply_op1(OnCuda(Softmax))?.to_dtype(x.dtype())
}

struct Softmax;

impl CudaOperator for Softmax {
    const NAME: &'static str = "softmax";

    fn forward(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let context = context::of(&x.device)?;
        let mut y = Output::new(&x.device, layout.shape(), DType::F32)?;
        {
            let x = read("the input of a softmax", &context, x, layout)?;
            transformer::softmax(&context, matrix(layout.shape()), x.slice(), y.write(&context)?.slice())?;
        }
        Ok(y.into_parts())
    }

    fn backward(&self, _: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Tensor> {
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
