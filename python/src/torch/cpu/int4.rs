//! Weights of 4-bit integers. A packed one is a run of bytes, int8 for torch.

use twofour::{
    Compressed, MatrixRef,
    int4::{Granularity, Int4},
    kernel::{Activation, Epilogue, SparseWeightInt4Ref, pack_int4, packed_bytes_int4},
};

use super::{Failure, Float, Result, ScalarType, Tensor, for_floats, linear, on_pool, on_torch_threads};
use crate::torch::{
    int4::{from_tensors, granularity, to_tensors},
    numbers::activation,
    shape::{dimension, expect_packed_int4, rows_and_last, with_last},
    tensor::Device,
};

/// Quantizes a matrix that is 2:4 along its rows: values, metadata and scales in canonical form.
pub(super) fn quantize(weight: Tensor, group_size: i64) -> Result<(Tensor, Tensor, Tensor)> {
    let dtype = weight.dtype()?;
    let granularity = granularity(group_size)?;
    for_floats!(dtype, "the weight", quantized::<T>(&weight, granularity))
}

fn quantized<T: Float>(weight: &Tensor, granularity: Granularity) -> Result<(Tensor, Tensor, Tensor)> {
    let (rows, cols) = weight.matrix("the weight")?;
    let values = weight.elements::<T>("the weight", T::SCALAR)?;
    let matrix = MatrixRef::new(rows, cols, &values)?;
    let weight = on_pool(|| Int4::quantize(&Compressed::from_dense(matrix)?, granularity))?;
    to_tensors(&weight?)
}

/// Packs a weight in canonical form.
pub(super) fn pack(values: Tensor, meta: Tensor, scales: Tensor, cols: i64, group_size: i64) -> Result<Tensor> {
    let weight = from_tensors((&values, &meta, &scales), cols, group_size)?;
    let len = packed_bytes_int4(weight.weight().rows(), weight.weight().cols(), weight.granularity())?;
    let mut packed = Tensor::empty(&[len as i64], ScalarType::I8)?;
    let bytes = packed.bytes_mut()?;
    on_pool(|| pack_int4(&weight, bytes))??;
    Ok(packed)
}

/// The canonical form of a packed weight.
pub(super) fn canonical(packed: Tensor, rows: i64, cols: i64, group_size: i64) -> Result<(Tensor, Tensor, Tensor)> {
    let (shape, granularity) = ((dimension("rows", rows)?, dimension("cols", cols)?), granularity(group_size)?);
    let expected = packed_bytes_int4(shape.0, shape.1, granularity)?;
    expect_packed_int4(&packed, expected, shape, &packed)?;
    let memory = linear::Memory::of(packed.bytes("the packed weight")?);
    to_tensors(&SparseWeightInt4Ref::with_granularity(shape, granularity, &memory)?.to_int4()?)
}

/// `y = x · Wᵀ` for floats `x` of shape `[..., in_features]` and a weight of integers with scales.
pub(super) fn linear(x: Tensor, packed: Tensor, out_features: i64, group_size: i64) -> Result<Tensor> {
    let dtype = x.dtype()?;
    let how = (out_features, group_size, Activation::Identity);
    for_floats!(dtype, "the input", forward::<T>(&x, &packed, None, how))
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
    let dtype = x.dtype()?;
    let how = (out_features, group_size, activation(number)?);
    for_floats!(dtype, "the input", forward::<T>(&x, &packed, Some(&bias), how))
}

fn forward<T: Float>(
    x: &Tensor,
    packed: &Tensor,
    bias: Option<&Tensor>,
    (out_features, group_size, activation): (i64, i64, Activation),
) -> Result<Tensor> {
    let (rows, granularity) = (dimension("out_features", out_features)?, granularity(group_size)?);
    let (tokens, cols) = rows_and_last(x, "the input")?;
    expect_packed_int4(packed, packed_bytes_int4(rows, cols, granularity)?, (rows, cols), x)?;
    let memory = linear::Memory::of(packed.bytes("the packed weight")?);
    let weight = SparseWeightInt4Ref::with_granularity((rows, cols), granularity, &memory)?;
    let values = x.elements::<T>("the input", T::SCALAR)?;
    let bias = bias.map(|bias| linear::widened(bias, T::SCALAR)).transpose()?;
    let epilogue = Epilogue { bias: bias.as_deref(), activation };
    let mut y = with_last(x, Device::HOST, out_features, T::SCALAR)?;
    on_torch_threads(|| weight.linear_floats(&values, tokens, epilogue, y.elements_mut()?).map_err(Failure::from))?;
    Ok(y)
}
