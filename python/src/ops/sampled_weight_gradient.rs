//! `dyᵀ · x` with the 2:4 estimate of `dyᵀ` along tokens, for `dy` `[tokens, out_features]` and `x` `[tokens,
//! in_features]` of one type.

use twofour::{
    estimate::Estimator,
    layer::{self, Accumulate},
};
use twofour_cuda::layer::borrowed::{self, MasterSlice};

use super::*;

/// A seed on a GPU is read when the kernel runs.
pub(super) const OPERATORS: &[Operator] = &[Operator::new(
    "sampled_weight_gradient(Tensor dy, Tensor x, int estimator, Tensor seed) -> Tensor",
    kernel!(cpu),
)
.cuda(kernel!(cuda))
.shapes(|arguments| {
    let (dy, x) = (arguments.tensor(0)?, arguments.tensor(1)?);
    let ([_, rows], [_, cols]) = (dy.matrix()?, x.matrix()?);
    Ok(vec![Shape::new([rows.clone(), cols.clone()])])
})
.product()];

fn cpu(dy: Tensor, x: Tensor, kind: EstimatorKind, seed: Tensor) -> Result<Tensor> {
    let dtype = dy.dtype()?;
    let estimator = kind.with_seed(numbers::seed(&seed)?)?;
    for_floats!(dtype, "the output gradient", on_cpu::<T>(&dy, &x, estimator))
}

fn on_cpu<T: Float>(dy: &Tensor, x: &Tensor, estimator: Estimator) -> Result<Tensor> {
    let (tokens, rows, cols) = sizes(dy, x)?;
    let dy = dy.elements::<T>("the output gradient", T::SCALAR)?;
    let x = x.elements::<T>("the input", T::SCALAR)?;
    let mut dw = Tensor::empty(&[rows as i64, cols as i64], T::SCALAR)?;
    let out = dw.elements_mut::<T>()?;
    on_torch_threads(|| {
        let estimate = layer::gradient_estimate(&dy, tokens, rows, estimator)?;
        layer::estimated_weight_gradient(estimate, &x, Accumulate::Overwrite, out)
    })?;
    Ok(dw)
}

fn cuda(dy: Tensor, x: Tensor, kind: EstimatorKind, seed: Tensor) -> Result<Tensor> {
    let context = context::of(&dy)?;
    let sampling = sampling(&context, kind, &seed)?;
    let (tokens, rows, cols) = sizes(&dy, &x)?;
    let (dy, x) = (dy.contiguous("the output gradient")?, x.contiguous("the input")?);
    if dy.dtype()? != x.dtype()? {
        let (dy, x) = (dy.dtype()?.name(), x.dtype()?.name());
        return Err(Failure::not_implemented(format!(
            "the output gradient has dtype {dy}, the input {x}; both must have the same"
        )));
    }
    if wide::is_wide(&dy)? {
        return wide::sampled_weight_gradient(&dy, &x, sampling);
    }
    half_type(&dy, "the output gradient")?;
    let mut dw = Tensor::empty_on(dy.device(), &[rows as i64, cols as i64], dy.dtype()?)?;
    let operands = (
        MasterSlice { data: slice(&context, &dy, "the output gradient")?, rows: tokens, cols: rows },
        MasterSlice { data: slice(&context, &x, "the input")?, rows: tokens, cols },
    );
    let out = slice_mut(&context, &mut dw, "the weight gradient")?;
    borrowed::sampled_weight_gradient(&context, operands, sampling, out)?;
    Ok(dw)
}

/// Tokens, features of the output and of the input.
fn sizes(dy: &Tensor, x: &Tensor) -> Result<(usize, usize, usize)> {
    let ((of_gradient, rows), (of_input, cols)) = (dy.matrix("the output gradient")?, x.matrix("the input")?);
    if of_gradient != of_input {
        return Err(Failure::runtime(format!(
            "the output gradient has {of_gradient} tokens, the input {of_input}: both must have as many"
        )));
    }
    Ok((of_gradient, rows, cols))
}
