//! The gated GELU.

use twofour::layer;

use super::{Failure, Float, Result, Tensor, for_floats, on_torch_threads};
use crate::torch::shape::{rows_and_last, with_last};
use crate::torch::tensor::Device;

const WHAT: &str = "the input of the gated GELU";

/// `x ⊙ gelu(g)` of the halves of the last dimension.
pub(super) fn gated_gelu(input: Tensor) -> Result<Tensor> {
    let dtype = input.dtype()?;
    for_floats!(dtype, WHAT, values::<T>(&input))
}

fn values<T: Float>(input: &Tensor) -> Result<Tensor> {
    let features = features(input)?;
    let halves = input.elements::<T>(WHAT, T::SCALAR)?;
    let mut y = with_last(input, Device::HOST, features as i64, T::SCALAR)?;
    let out = y.elements_mut::<T>()?;
    on_torch_threads(|| layer::gated_gelu(&halves, features, out))?;
    Ok(y)
}

/// The gradient of the input of [`gated_gelu`].
pub(super) fn gradient(input: Tensor, dy: Tensor) -> Result<Tensor> {
    let dtype = input.dtype()?;
    for_floats!(dtype, WHAT, gradients::<T>(&input, &dy))
}

fn gradients<T: Float>(input: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let features = features(input)?;
    let halves = input.elements::<T>(WHAT, T::SCALAR)?;
    let dy = dy.elements::<T>("the output gradient", T::SCALAR)?;
    let mut gradient = Tensor::empty(input.sizes(), T::SCALAR)?;
    let out = gradient.elements_mut::<T>()?;
    on_torch_threads(|| layer::gated_gelu_gradient(&halves, &dy, features, out))?;
    Ok(gradient)
}

/// Half of the last dimension.
fn features(input: &Tensor) -> Result<usize> {
    match rows_and_last(input, WHAT)?.1 {
        odd if !odd.is_multiple_of(2) => {
            Err(Failure::runtime(format!("{WHAT} has {odd} columns; an even number is required")))
        }
        even => Ok(even / 2),
    }
}
