//! GEMMs with a packed weight.

use twofour::layer::Activation;
use twofour_cuda::{
    DataType,
    layer::borrowed::{self, Float8Epilogue, PackedSlice, packed_len},
};

use super::{Result, ScalarType, Tensor, context, half_type, packable, slice, slice_mut, wide};
use crate::torch::{
    numbers::{self, activation},
    shape::{dimension, expect_float8, expect_packed, rows_and_last, with_last},
};

/// `y = x · Wᵀ`, `x` of shape `[..., in_features]`.
pub(super) fn linear(x: Tensor, packed: Tensor, out_features: i64) -> Result<Tensor> {
    forward(&x, &packed, None, out_features, Activation::Identity)
}

/// `y = activation(x · Wᵀ + bias)`.
pub(super) fn linear_bias(x: Tensor, packed: Tensor, bias: Tensor, out_features: i64, act: i64) -> Result<Tensor> {
    forward(&x, &packed, Some(&bias), out_features, activation(act)?)
}

fn forward(
    x: &Tensor,
    packed: &Tensor,
    bias: Option<&Tensor>,
    out_features: i64,
    activation: Activation,
) -> Result<Tensor> {
    let rows = dimension("out_features", out_features)?;
    let (tokens, cols) = rows_and_last(x, "the input")?;
    if wide::is_wide(x)? || cols == 0 {
        return wide::linear(x, packed, bias, rows, activation);
    }
    let (dtype, context) = (half_type(x, "the input")?, context::of(x)?);
    expect_packed(packed, packed_len(dtype, rows, cols)?, x.dtype()?, (rows, cols), x)?;
    let (x, packed) = (x.contiguous("the input")?, packed.contiguous("the packed weight")?);
    let bias = bias.map(|bias| bias.contiguous("the bias")).transpose()?;
    let bias = bias.as_ref().map(|bias| slice(&context, bias, "the bias")).transpose()?;
    let mut y = with_last(&x, x.device(), out_features, x.dtype()?)?;
    let weight = PackedSlice::new(slice(&context, &packed, "the packed weight")?, rows, cols);
    let (input, output) = (slice(&context, &x, "the input")?, slice_mut(&context, &mut y, "the output")?);
    borrowed::linear(&context, weight, input, tokens, bias, activation, output)?;
    Ok(y)
}

/// `dx = dy · W`, `dy` of shape `[..., out_features]`.
pub(super) fn input_gradient(dy: Tensor, packed: Tensor, in_features: i64) -> Result<Tensor> {
    let cols = dimension("in_features", in_features)?;
    if wide::is_wide(&dy)? {
        return wide::input_gradient(&dy, &packed, cols);
    }
    let (dtype, context) = (half_type(&dy, "the output gradient")?, context::of(&dy)?);
    let (tokens, rows) = rows_and_last(&dy, "the output gradient")?;
    expect_packed(&packed, packed_len(dtype, rows, cols)?, dy.dtype()?, (rows, cols), &dy)?;
    let (dy, packed) = (dy.contiguous("the output gradient")?, packed.contiguous("the packed weight")?);
    let mut dx = with_last(&dy, dy.device(), in_features, dy.dtype()?)?;
    let weight = PackedSlice::new(slice(&context, &packed, "the packed weight")?, rows, cols);
    let (gradient, output) =
        (slice(&context, &dy, "the output gradient")?, slice_mut(&context, &mut dx, "the input gradient")?);
    borrowed::input_gradient(&context, weight, gradient, tokens, output)?;
    Ok(dx)
}

/// `y = x · Wᵀ` for 16-bit floats `x`, quantized for each token, and a weight of integers with a scale for each row.
pub(super) fn linear_quantized(x: Tensor, packed: Tensor, scales: Tensor, out_features: i64) -> Result<Tensor> {
    scaled(&x, (&packed, &scales), None, out_features, Activation::Identity)
}

/// The same with a bias and an activation.
pub(super) fn linear_quantized_bias(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Tensor,
    out_features: i64,
    act: i64,
) -> Result<Tensor> {
    scaled(&x, (&packed, &scales), Some(&bias), out_features, activation(act)?)
}

fn scaled(
    x: &Tensor,
    (packed, scales): (&Tensor, &Tensor),
    bias: Option<&Tensor>,
    out_features: i64,
    activation: Activation,
) -> Result<Tensor> {
    half_type(x, "the input")?;
    let context = context::of(x)?;
    let rows = dimension("out_features", out_features)?;
    let (tokens, cols) = rows_and_last(x, "the input")?;
    expect_packed(packed, packed_len(DataType::I8, rows, cols)?, ScalarType::I8, (rows, cols), x)?;
    let (x, packed) = (x.contiguous("the input")?, packed.contiguous("the packed weight")?);
    let (scales, bias) = (scales.contiguous("the scales")?, bias.map(|bias| bias.contiguous("the bias")).transpose()?);
    let bias = bias.as_ref().map(|bias| slice(&context, bias, "the bias")).transpose()?;
    let mut y = with_last(&x, x.device(), out_features, x.dtype()?)?;
    let weight = PackedSlice::new(slice(&context, &packed, "the packed weight")?, rows, cols);
    let scales = slice(&context, &scales, "the scales")?;
    let (input, output) = (slice(&context, &x, "the input")?, slice_mut(&context, &mut y, "the output")?);
    borrowed::scaled_linear(&context, (weight, scales), input, tokens, bias, activation, output)?;
    Ok(y)
}

/// `y = x · Wᵀ` of integers, exact, in int32.
pub(super) fn linear_i8(x: Tensor, packed: Tensor, out_features: i64) -> Result<Tensor> {
    let (context, rows) = (context::of(&x)?, dimension("out_features", out_features)?);
    let (tokens, cols) = rows_and_last(&x, "the input")?;
    expect_packed(&packed, packed_len(DataType::I8, rows, cols)?, ScalarType::I8, (rows, cols), &x)?;
    let (x, packed) = (x.contiguous("the input")?, packed.contiguous("the packed weight")?);
    let mut y = with_last(&x, x.device(), out_features, ScalarType::I32)?;
    let weight = PackedSlice::new(slice(&context, &packed, "the packed weight")?, rows, cols);
    let (input, output) = (slice(&context, &x, "the input")?, slice_mut(&context, &mut y, "the output")?);
    borrowed::exact_linear(&context, weight, input, tokens, output)?;
    Ok(y)
}

/// `y = x · Wᵀ · scales + bias` for 8-bit floats, summed in f32; `y` is of torch's type number `dtype`. `scales` has a number for each feature,
/// `token_scales` for each token or none, `bias`, of the type of `y`, for each feature or none.
pub(super) fn linear_float8(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    token_scales: Tensor,
    bias: Tensor,
    out_features: i64,
    dtype: i64,
) -> Result<Tensor> {
    let (context, rows) = (context::of(&x)?, dimension("out_features", out_features)?);
    let (tokens, cols) = rows_and_last(&x, "the input")?;
    let dtype = numbers::packed_type(dtype, x.dtype()?)?;
    if !matches!(dtype, ScalarType::F32 | ScalarType::F16 | ScalarType::Bf16) {
        return Err(numbers::no_result(dtype));
    }
    expect_float8(&x, &packed)?;
    expect_packed(&packed, packed_len(packable(packed.dtype()?)?, rows, cols)?, packed.dtype()?, (rows, cols), &x)?;
    numbers::expect_scales(&scales, "the scales", rows)?;
    numbers::expect_scales(&token_scales, "the tokens' scales", tokens)?;
    let (x, packed) = (x.contiguous("the input")?, packed.contiguous("the packed weight")?);
    let (scales, token_scales) = (scales.contiguous("the scales")?, token_scales.contiguous("the tokens' scales")?);
    let bias = bias.contiguous("the bias")?;
    let optional = |tensor: &'_ Tensor| tensor.numel() != 0;
    let mut y = with_last(&x, x.device(), out_features, dtype)?;
    let weight = PackedSlice::new(slice(&context, &packed, "the packed weight")?, rows, cols);
    let epilogue = Float8Epilogue {
        scales: optional(&scales).then(|| slice(&context, &scales, "the scales")).transpose()?,
        token_scales: optional(&token_scales)
            .then(|| slice(&context, &token_scales, "the tokens' scales"))
            .transpose()?,
        bias: optional(&bias).then(|| slice(&context, &bias, "the bias")).transpose()?,
    };
    let (input, output) = (slice(&context, &x, "the input")?, slice_mut(&context, &mut y, "the output")?);
    borrowed::float8_linear(&context, weight, input, tokens, epilogue, output)?;
    Ok(y)
}
