//! `activation(x · Wᵀ + bias)` of floats, `x` of shape `[..., in_features]`.

use twofour::kernel::{Activation, Epilogue, SparseWeightRef, packed_bytes};
use twofour_cuda::layer::borrowed::{self, PackedSlice, packed_len};

use super::*;

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new(
        "linear(Tensor x, Tensor packed, int out_features) -> Tensor",
        kernel!(|x: Tensor, packed: Tensor, rows: usize| cpu(x, packed, None, rows, Activation::Identity)),
    )
    .cuda(kernel!(|x: Tensor, packed: Tensor, rows: usize| cuda(x, packed, None, rows, Activation::Identity)))
    .shapes(|arguments| arguments.with_last(2))
    .by_rows()
    .product(),
    Operator::new(
        "linear_bias(Tensor x, Tensor packed, Tensor bias, int out_features, int activation) -> Tensor",
        kernel!(cpu),
    )
    .cuda(kernel!(cuda))
    .shapes(|arguments| arguments.with_last(3))
    .by_rows()
    .product(),
];

fn cpu(x: Tensor, packed: Tensor, bias: Option<Tensor>, rows: usize, activation: Activation) -> Result<Tensor> {
    let dtype = x.dtype()?;
    for_floats!(dtype, "the input", on_cpu::<T>(&x, &packed, bias.as_ref(), rows, activation))
}

fn on_cpu<T: Float>(
    x: &Tensor,
    packed: &Tensor,
    bias: Option<&Tensor>,
    rows: usize,
    activation: Activation,
) -> Result<Tensor> {
    let (tokens, cols) = rows_and_last(x, "the input")?;
    expect_packed(packed, packed_bytes::<T>(rows, cols)? / size_of::<T>(), T::SCALAR, (rows, cols), x)?;
    let memory = Memory::of(packed)?;
    let weight = SparseWeightRef::<T>::new(rows, cols, &memory)?;
    let values = x.elements::<T>("the input", T::SCALAR)?;
    let bias = bias.map(|bias| bias_of(bias, T::SCALAR)).transpose()?;
    let mut y = with_last(x, Device::HOST, rows, T::SCALAR)?;
    let epilogue = Epilogue { bias: bias.as_deref(), activation };
    on_torch_threads(|| weight.linear(&values, tokens, epilogue, y.elements_mut()?).map_err(Failure::from))?;
    Ok(y)
}

fn cuda(x: Tensor, packed: Tensor, bias: Option<Tensor>, rows: usize, activation: Activation) -> Result<Tensor> {
    let (x, packed, bias) = (&x, &packed, bias.as_ref());
    let (tokens, cols) = rows_and_last(x, "the input")?;
    if wide::is_wide(x)? || cols == 0 {
        return wide::linear(x, packed, bias, rows, activation);
    }
    let (dtype, context) = (half_type(x, "the input")?, context::of(x)?);
    expect_packed(packed, packed_len(dtype, rows, cols)?, x.dtype()?, (rows, cols), x)?;
    multiply(&context, (x, packed, bias), (rows, x.dtype()?), |p| {
        let weight = PackedSlice::new(p.packed, rows, cols);
        Ok(borrowed::linear(&context, weight, p.input, tokens, p.bias, activation, p.output)?)
    })
}
