//! `activation(x · Wᵀ + bias)` for floats `x`, quantized for each token, and a weight of 8-bit integers with a scale
//! for each row.

use twofour::kernel::{Activation, Epilogue};
use twofour_cuda::{
    DataType,
    layer::borrowed::{self, PackedSlice, packed_len},
};

use super::*;

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new(
        "linear_quantized(Tensor x, Tensor packed, Tensor scales, int out_features) -> Tensor",
        kernel!(|x: Tensor, packed: Tensor, scales: Tensor, rows: usize| {
            cpu(x, packed, scales, None, rows, Activation::Identity)
        }),
    )
    .cuda(kernel!(|x: Tensor, packed: Tensor, scales: Tensor, rows: usize| {
        cuda(x, packed, scales, None, rows, Activation::Identity)
    }))
    .shapes(|arguments| arguments.with_last(3))
    .by_rows()
    .product(),
    Operator::new(
        "linear_quantized_bias(Tensor x, Tensor packed, Tensor scales, Tensor bias, int out_features, int activation) \
         -> Tensor",
        kernel!(cpu),
    )
    .cuda(kernel!(cuda))
    .shapes(|arguments| arguments.with_last(4))
    .by_rows()
    .product(),
];

fn cpu(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Option<Tensor>,
    rows: usize,
    activation: Activation,
) -> Result<Tensor> {
    let dtype = x.dtype()?;
    let (tokens, cols) = rows_and_last(&x, "the input")?;
    let scales = scales.elements::<f32>("the scales", ScalarType::F32)?;
    int8::multiplied(&x, &packed, (rows, cols), Some(&scales), |weight| {
        let bias = bias.as_ref().map(|bias| bias_of(bias, dtype)).transpose()?;
        let epilogue = Epilogue { bias: bias.as_deref(), activation };
        let values = for_floats!(dtype, "the input", widened::<T>(&x, "the input"))?;
        let mut y = with_last(&x, Device::HOST, rows, dtype)?;
        if dtype == ScalarType::F32 {
            on_torch_threads(|| weight.linear(&values, tokens, epilogue, y.elements_mut()?).map_err(Failure::from))?;
        } else {
            let mut sums = vec![0f32; tokens * rows];
            on_torch_threads(|| weight.linear(&values, tokens, epilogue, &mut sums))?;
            round_into(&mut y, &sums)?;
        }
        Ok(y)
    })
}

fn cuda(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Option<Tensor>,
    rows: usize,
    activation: Activation,
) -> Result<Tensor> {
    let (x, packed, bias) = (&x, &packed, bias.as_ref());
    half_type(x, "the input")?;
    let context = context::of(x)?;
    let (tokens, cols) = rows_and_last(x, "the input")?;
    expect_packed(packed, packed_len(DataType::I8, rows, cols)?, ScalarType::I8, (rows, cols), x)?;
    let scales = scales.contiguous("the scales")?;
    multiply(&context, (x, packed, bias), (rows, x.dtype()?), |p| {
        let weight = (PackedSlice::new(p.packed, rows, cols), slice(&context, &scales, "the scales")?);
        Ok(borrowed::scaled_linear(&context, weight, p.input, tokens, p.bias, activation, p.output)?)
    })
}
