//! Element-wise activations.

use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor, backend::BackendStorage as _};
use twofour::kernel::Activation;
use twofour_transformer::cuda::{ElementFunction, activation_backward, activation_forward};

use super::{
    context,
    memory::{Locked, Output, read},
    not_on_the_cpu,
};
use crate::Result;

/// [`crate::ops::activate()`] for a CUDA tensor.
pub(crate) fn activate(x: &Tensor, activation: Activation) -> candle_core::Result<Tensor> {
    x.contiguous()?.apply_op1(Activate(ElementFunction::Activation(activation)))
}

struct Activate(ElementFunction);

impl Activate {
    fn forward(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let context = context::of(&x.device)?;
        let mut y = Output::new(&x.device, layout.shape(), x.dtype())?;
        {
            let x = read("the input of an activation", &context, x, layout)?;
            activation_forward(&context, self.0, x.slice(), y.write(&context)?.slice())?;
        }
        Ok(y.into_parts())
    }

    fn backward(&self, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
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

impl CustomOp1 for Activate {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        not_on_the_cpu("activation")
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok(self.forward(x, layout)?)
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.backward(x, dy)?))
    }
}
