//! The sums of `dy` over all dimensions but the last, in f32.

use twofour::layer::{Accumulate, bias_gradient};
use twofour_cuda::layer;

use super::*;

pub(super) const OPERATORS: &[Operator] = &[Operator::new("bias_gradient(Tensor dy) -> Tensor", kernel!(cpu))
    .cuda(kernel!(cuda))
    .shapes(|arguments| Ok(vec![Shape::new(arguments.tensor(0)?.sizes.pop())]))];

fn cpu(dy: Tensor) -> Result<Tensor> {
    let dtype = dy.dtype()?;
    for_floats!(dtype, "the output gradient", on_cpu::<T>(&dy))
}

fn on_cpu<T: Float>(dy: &Tensor) -> Result<Tensor> {
    let (tokens, features) = rows_and_last(dy, "the output gradient")?;
    let values = dy.elements::<T>("the output gradient", T::SCALAR)?;
    let mut out = Tensor::empty(&[features as i64], T::SCALAR)?;
    on_torch_threads(|| {
        bias_gradient(&values, tokens, Accumulate::Overwrite, out.elements_mut::<T>()?).map_err(Failure::from)
    })?;
    Ok(out)
}

fn cuda(dy: Tensor) -> Result<Tensor> {
    let context = context::of(&dy)?;
    let (tokens, features) = rows_and_last(&dy, "the output gradient")?;
    let dtype = dy.dtype()?;
    if !matches!(dtype, ScalarType::F32 | ScalarType::F16 | ScalarType::Bf16) {
        return Err(not_a_float("the output gradient", dtype));
    }
    let dy = dy.contiguous("the output gradient")?;
    let mut db = Tensor::empty_on(dy.device(), &[features as i64], dtype)?;
    let sums = slice_mut(&context, &mut db, "the bias gradient")?;
    layer::bias_gradient(&context, slice(&context, &dy, "the output gradient")?, tokens, Accumulate::Overwrite, sums)?;
    Ok(db)
}
