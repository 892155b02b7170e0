//! `activation(x · Wᵀ + bias)` for floats `x` of shape `[..., in_features]` and a weight of 4-bit integers with scales.

use twofour::{
    int4::Granularity,
    kernel::{Activation, Epilogue, SparseWeightInt4Ref, packed_bytes_int4},
};
use twofour_cuda::layer::borrowed::int4::{self, Int4Slice};

use super::*;

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new(
        "linear_int4(Tensor x, Tensor packed, int out_features, int group_size) -> Tensor",
        kernel!(|x: Tensor, packed: Tensor, rows: usize, granularity: Granularity| {
            cpu(x, packed, None, rows, granularity, Activation::Identity)
        }),
    )
    .cuda(kernel!(|x: Tensor, packed: Tensor, rows: usize, granularity: Granularity| {
        cuda(x, packed, None, rows, granularity, Activation::Identity)
    }))
    .shapes(|arguments| arguments.with_last(2))
    .by_rows()
    .product(),
    Operator::new(
        "linear_int4_bias(Tensor x, Tensor packed, Tensor bias, int out_features, int group_size, int activation) -> \
         Tensor",
        kernel!(cpu),
    )
    .cuda(kernel!(cuda))
    .shapes(|arguments| arguments.with_last(3))
    .by_rows()
    .product(),
];

fn cpu(
    x: Tensor,
    packed: Tensor,
    bias: Option<Tensor>,
    rows: usize,
    granularity: Granularity,
    activation: Activation,
) -> Result<Tensor> {
    let dtype = x.dtype()?;
    for_floats!(dtype, "the input", on_cpu::<T>(&x, &packed, bias.as_ref(), (rows, granularity, activation)))
}

fn on_cpu<T: Float>(
    x: &Tensor,
    packed: &Tensor,
    bias: Option<&Tensor>,
    (rows, granularity, activation): (usize, Granularity, Activation),
) -> Result<Tensor> {
    let (tokens, cols) = rows_and_last(x, "the input")?;
    expect_packed_int4(packed, packed_bytes_int4(rows, cols, granularity)?, (rows, cols), x)?;
    let memory = Memory::of(packed)?;
    let weight = SparseWeightInt4Ref::with_granularity((rows, cols), granularity, &memory)?;
    let values = x.elements::<T>("the input", T::SCALAR)?;
    let bias = bias.map(|bias| bias_of(bias, T::SCALAR)).transpose()?;
    let epilogue = Epilogue { bias: bias.as_deref(), activation };
    let mut y = with_last(x, Device::HOST, rows, T::SCALAR)?;
    on_torch_threads(|| weight.linear_floats(&values, tokens, epilogue, y.elements_mut()?).map_err(Failure::from))?;
    Ok(y)
}

fn cuda(
    x: Tensor,
    packed: Tensor,
    bias: Option<Tensor>,
    rows: usize,
    granularity: Granularity,
    activation: Activation,
) -> Result<Tensor> {
    let (x, packed, bias) = (&x, &packed, bias.as_ref());
    half_type(x, "the input")?;
    let context = context::of(x)?;
    let (tokens, cols) = rows_and_last(x, "the input")?;
    expect_packed_int4(packed, int4::packed_len(rows, cols, granularity)?, (rows, cols), x)?;
    if cols == 0 && tokens * rows > 0 {
        return Err(Failure::runtime("the input has no features: an int4 weight on a GPU has at least one column"));
    }
    multiply(&context, (x, packed, bias), (rows, x.dtype()?), |p| {
        let weight = Int4Slice { memory: p.packed, rows, cols, granularity };
        Ok(int4::linear(&context, weight, p.input, tokens, p.bias, activation, p.output)?)
    })
}
