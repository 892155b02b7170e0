//! Weights of 4-bit integers. A packed one is a run of bytes, int8 for torch.

use twofour::layer::Activation;
use twofour_cuda::layer::borrowed::int4::{self, Int4Slice};

use super::{Failure, Result, ScalarType, Tensor, context, half_type, slice, slice_mut};
use crate::torch::{
    int4::{from_tensors, granularity, to_tensors},
    numbers::activation,
    shape::{dimension, expect_packed_int4, rows_and_last, with_last},
    tensor::Device,
};

/// Packs a weight in canonical form, which is converted in the host's memory.
pub(super) fn pack(values: Tensor, meta: Tensor, scales: Tensor, cols: i64, group_size: i64) -> Result<Tensor> {
    let packed = int4::encode(&from_tensors((&values, &meta, &scales), cols, group_size)?)?;
    let mut host = Tensor::empty(&[packed.len() as i64], ScalarType::I8)?;
    host.bytes_mut()?.copy_from_slice(&packed);
    host.copied_to(values.device(), "the packed weight")
}

/// The canonical form of a packed weight, which is converted in the host's memory.
pub(super) fn canonical(packed: Tensor, rows: i64, cols: i64, group_size: i64) -> Result<(Tensor, Tensor, Tensor)> {
    let (shape, granularity) = ((dimension("rows", rows)?, dimension("cols", cols)?), granularity(group_size)?);
    expect_packed_int4(&packed, int4::packed_len(shape.0, shape.1, granularity)?, shape, &packed)?;
    let (device, host) = (packed.device(), packed.copied_to(Device::HOST, "the packed weight")?);
    let weight = int4::decode(host.bytes("the packed weight")?, shape.0, shape.1, granularity)?;
    let (values, meta, scales) = to_tensors(&weight)?;
    Ok((
        values.copied_to(device, "the values")?,
        meta.copied_to(device, "the metadata")?,
        scales.copied_to(device, "the scales")?,
    ))
}

/// `y = x · Wᵀ` for 16-bit floats `x` of shape `[..., in_features]` and a weight of integers with scales.
pub(super) fn linear(x: Tensor, packed: Tensor, out_features: i64, group_size: i64) -> Result<Tensor> {
    forward(&x, &packed, None, (out_features, group_size, Activation::Identity))
}

/// `y = activation(x · Wᵀ + bias)`.
pub(super) fn linear_bias(
    x: Tensor,
    packed: Tensor,
    bias: Tensor,
    out_features: i64,
    group_size: i64,
    number: i64,
) -> Result<Tensor> {
    forward(&x, &packed, Some(&bias), (out_features, group_size, activation(number)?))
}

fn forward(
    x: &Tensor,
    packed: &Tensor,
    bias: Option<&Tensor>,
    (out_features, group_size, activation): (i64, i64, Activation),
) -> Result<Tensor> {
    half_type(x, "the input")?;
    let (context, granularity) = (context::of(x)?, granularity(group_size)?);
    let rows = dimension("out_features", out_features)?;
    let (tokens, cols) = rows_and_last(x, "the input")?;
    expect_packed_int4(packed, int4::packed_len(rows, cols, granularity)?, (rows, cols), x)?;
    if cols == 0 && tokens * rows > 0 {
        return Err(Failure::runtime("the input has no features: an int4 weight on a GPU has at least one column"));
    }
    let (x, packed) = (x.contiguous("the input")?, packed.contiguous("the packed weight")?);
    let bias = bias.map(|bias| bias.contiguous("the bias")).transpose()?;
    let bias = bias.as_ref().map(|bias| slice(&context, bias, "the bias")).transpose()?;
    let mut y = with_last(&x, x.device(), out_features, x.dtype()?)?;
    let weight = Int4Slice { memory: slice(&context, &packed, "the packed weight")?, rows, cols, granularity };
    let (input, output) = (slice(&context, &x, "the input")?, slice_mut(&context, &mut y, "the output")?);
    int4::linear(&context, weight, input, tokens, bias, activation, output)?;
    Ok(y)
}
