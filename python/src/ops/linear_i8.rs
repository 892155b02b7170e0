//! `y = x · Wᵀ` of 8-bit integers, exact, in int32.

use twofour_cuda::{
    DataType,
    layer::borrowed::{self, PackedSlice, packed_len},
};

use super::*;

pub(super) const OPERATORS: &[Operator] =
    &[Operator::new("linear_i8(Tensor x, Tensor packed, int out_features) -> Tensor", kernel!(cpu))
        .cuda(kernel!(cuda))
        .shapes(|arguments| {
            let results = arguments.with_last(2)?;
            Ok(results.into_iter().map(|result| result.of(ScalarType::I32)).collect())
        })
        .by_rows()
        .product()];

fn cpu(x: Tensor, packed: Tensor, rows: usize) -> Result<Tensor> {
    let (tokens, cols) = rows_and_last(&x, "the input")?;
    let values = x.elements::<i8>("the input", ScalarType::I8)?;
    int8::multiplied(&x, &packed, (rows, cols), None, |weight| {
        let mut y = with_last(&x, Device::HOST, rows, ScalarType::I32)?;
        on_torch_threads(|| weight.product(&values, tokens, y.elements_mut()?).map_err(Failure::from))?;
        Ok(y)
    })
}

fn cuda(x: Tensor, packed: Tensor, rows: usize) -> Result<Tensor> {
    let context = context::of(&x)?;
    let (tokens, cols) = rows_and_last(&x, "the input")?;
    expect_packed(&packed, packed_len(DataType::I8, rows, cols)?, ScalarType::I8, (rows, cols), &x)?;
    multiply(&context, (&x, &packed, None), (rows, ScalarType::I32), |p| {
        Ok(borrowed::exact_linear(&context, PackedSlice::new(p.packed, rows, cols), p.input, tokens, p.output)?)
    })
}
