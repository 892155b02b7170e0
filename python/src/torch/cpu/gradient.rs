//! Gradients of a layer's parameters.

use twofour::layer::{self, Accumulate};

use super::{Float, Result, Tensor, for_floats, on_torch_threads};
use crate::torch::{numbers, shape::rows_and_last};

/// `dyᵀ · x` with the 2:4 estimate of `dyᵀ` along tokens, for `dy` `[tokens, out_features]` and `x` `[tokens, in_features]` of one type.
pub(super) fn sampled_weight_gradient(dy: Tensor, x: Tensor, estimator: i64, seed: Tensor) -> Result<Tensor> {
    let dtype = dy.dtype()?;
    let seed = numbers::seed(&seed)?;
    for_floats!(dtype, "the output gradient", sampled::<T>(&dy, &x, estimator, seed))
}

fn sampled<T: Float>(dy: &Tensor, x: &Tensor, estimator: i64, seed: i64) -> Result<Tensor> {
    let estimator = numbers::estimator(estimator, seed)?;
    let ((tokens, outputs), (x_tokens, inputs)) = (dy.matrix("the output gradient")?, x.matrix("the input")?);
    numbers::expect_tokens(tokens, x_tokens)?;
    let dy = dy.elements::<T>("the output gradient", T::SCALAR)?;
    let x = x.elements::<T>("the input", T::SCALAR)?;
    let mut dw = Tensor::empty(&[outputs as i64, inputs as i64], T::SCALAR)?;
    let out = dw.elements_mut::<T>()?;
    on_torch_threads(|| {
        let estimate = layer::gradient_estimate(&dy, tokens, outputs, estimator)?;
        layer::estimated_weight_gradient(estimate, &x, Accumulate::Overwrite, out)
    })?;
    Ok(dw)
}

/// The sums of `dy` over all dimensions but the last, in f32.
pub(super) fn bias_gradient(dy: Tensor) -> Result<Tensor> {
    let dtype = dy.dtype()?;
    for_floats!(dtype, "the output gradient", sums::<T>(&dy))
}

fn sums<T: Float>(dy: &Tensor) -> Result<Tensor> {
    let (tokens, features) = rows_and_last(dy, "the output gradient")?;
    let values = dy.elements::<T>("the output gradient", T::SCALAR)?;
    let mut out = Tensor::empty(&[features as i64], T::SCALAR)?;
    on_torch_threads(|| {
        layer::bias_gradient(&values, tokens, Accumulate::Overwrite, out.elements_mut::<T>()?)
            .map_err(super::Failure::from)
    })?;
    Ok(out)
}
