//! Element-wise activations.

use candle_core::{CudaStorage, Layout, Shape, Tensor, backend::BackendStorage as _};
use twofour::kernel::Activation;
use twofour_transformer::cuda::{ElementFunction, activation_backward, activation_forward};

use super::{
    CudaOperator, OnCuda, context,
    memory::{Locked, Output, read},
};
use crate::Result;

/// [`crate::ops::activate()`] for a CUDA tensor.
pub(crate) fn activate(x: &Tensor, activation: Activation) -> candle_core::Result<Tensor> {
    x.contiguous()?.apply_op1(OnCuda(Activate(ElementFunction::Activation(activation))))
}

struct Activate(ElementFunction);

impl CudaOperator for Activate {
    const NAME: &'static str = "activation";

    fn forward(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let context = context::of(&x.device)?;
        let mut y = Output::new(&x.device, layout.shape(), x.dtype())?;
        {
            let x = read("the input of an activation", &context, x, layout)?;
            activation_forward(&context, self.0, x.slice(), y.write(&context)?.slice())?;
        }
        Ok(y.into_parts())
    }

    fn backward(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Tensor> {
        let device = context::device_of("the input of an activation", x.device())?;
        let context = context::of(device)?;
        let dy = dy.contiguous()?;
        let mut dx = Output::new(device, x.shape(), x.dtype())?;
        {
            let x = Locked::new("the input of an activation", x);
            let dy = Locked::new("the gradient of an activation", &dy);
            let (x, dy) = (x.read(&context)?, dy.read(&context)?);
            activation_backward(&context, self.0, x.slice(), dy.slice(), dx.write(&context)?.slice())?;
        }
        Ok(dx.into_tensor())
    }
}
