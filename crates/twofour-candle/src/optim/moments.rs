//! The moments of a parameter where the parameter is, and sums of squares where gradients are.

use candle_core::{Tensor, Var};
use twofour_transformer::cpu::adamw;

#[cfg(feature = "cuda")]
use crate::cuda::adamw as cuda;
use crate::{
    Error, Result,
    float::{convert, for_float, with_elements},
};

/// The first and the second moment of a parameter, f32.
#[derive(Debug)]
pub(super) enum Moments {
    /// Of a parameter on the CPU.
    Host([Vec<f32>; 2]),
    /// Of a parameter on a GPU.
    #[cfg(feature = "cuda")]
    Cuda(cuda::Moments),
}

impl Moments {
    /// Zeros for a parameter.
    ///
    /// # Errors
    /// [`Error::Device`] for a parameter on a device without an optimizer.
    pub(super) fn new(var: &Var) -> Result<Self> {
        match var.device() {
            candle_core::Device::Cpu => Ok(Moments::Host([vec![0.0; var.elem_count()], vec![0.0; var.elem_count()]])),
            #[cfg(feature = "cuda")]
            candle_core::Device::Cuda(device) => Ok(Moments::Cuda(cuda::Moments::new(device, var.elem_count())?)),
            other => Err(Error::Device { what: "a parameter", found: other.location() }),
        }
    }

    /// Copies in host memory.
    pub(super) fn to_host(&self) -> Result<[Vec<f32>; 2]> {
        match self {
            Moments::Host(moments) => Ok(moments.clone()),
            #[cfg(feature = "cuda")]
            Moments::Cuda(moments) => moments.to_host(),
        }
    }

    /// Overwrites them with as many numbers.
    pub(super) fn write(&mut self, values: [Vec<f32>; 2]) -> Result<()> {
        match self {
            Moments::Host(moments) => *moments = values,
            #[cfg(feature = "cuda")]
            Moments::Cuda(moments) => moments.write([&values[0], &values[1]])?,
        }
        Ok(())
    }
}

/// The sum of the squares of all elements of all gradients, in f64.
pub(super) fn sum_of_squares(gradients: &[&Tensor]) -> Result<f64> {
    let mut sum = 0.0;
    #[cfg(feature = "cuda")]
    let gradients = &{
        let (on_gpus, others): (Vec<&Tensor>, Vec<&Tensor>) = gradients.iter().partition(|g| g.device().is_cuda());
        sum += cuda::sum_of_squares(&on_gpus)?;
        others
    };
    for gradient in gradients {
        sum += for_float!("a gradient", gradient.dtype(), T => with_elements::<T, _>("a gradient", gradient, |g| {
            Ok(adamw::sum_of_squares(&convert::<T, f32>(g)))
        }))?;
    }
    Ok(sum)
}
