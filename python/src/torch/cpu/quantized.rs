//! Weights of 8-bit integers.
//!
//! A packed one is a run of bytes: strips as for floats, then an i32 for each row, the sum of its values.

use std::borrow::Cow;

use half::{bf16, f16};
use twofour::{
    Compressed, MatrixRef,
    kernel::{Activation, Epilogue, SparseWeightI8Ref, pack_i8, packed_bytes, quantize},
};

use super::{Failure, Float, Result, ScalarType, Tensor, for_floats, linear, on_pool, on_torch_threads};
use crate::torch::{
    numbers::activation,
    shape::{dimension, expect_packed, rows_and_last, with_last},
    tensor::Device,
};

/// Elements of a packed weight.
fn packed_len(rows: usize, cols: usize) -> Result<usize> {
    Ok(packed_bytes::<i8>(rows, cols)? + 4 * rows)
}

/// The packed form of a weight.
pub(super) fn packed_of(weight: &Compressed<i8>) -> Result<Tensor> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let mut packed = Tensor::empty(&[packed_len(rows, cols)? as i64], ScalarType::I8)?;
    let (strips, sums) = packed.bytes_mut()?.split_at_mut(packed_bytes::<i8>(rows, cols)?);
    let found = on_pool(|| pack_i8(weight, strips))??;
    sums.copy_from_slice(bytemuck::cast_slice(&found));
    Ok(packed)
}

/// The canonical form of a packed weight.
pub(super) fn compressed(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<i8>> {
    let (found, expected) = (packed.numel(), packed_len(rows, cols)?);
    if found != expected {
        return Err(Failure::runtime(format!(
            "a packed int8 weight of shape {:?} has {expected} elements, and the tensor has {found}",
            (rows, cols)
        )));
    }
    let memory = linear::Memory::of(packed.bytes("the packed weight")?);
    // Scales play no part.
    let (strips, sums) = memory.split_at(packed_bytes::<i8>(rows, cols)?);
    let (scales, sums) = (vec![1.0; rows], bytemuck::pod_collect_to_vec(sums));
    Ok(SparseWeightI8Ref::with_sums((rows, cols), strips, &scales, &sums)?.to_compressed())
}

/// Quantizes a matrix to 8-bit integers, symmetrically, with a scale for each row.
pub(super) fn quantize_rows(dense: Tensor) -> Result<(Tensor, Tensor)> {
    let dtype = dense.dtype()?;
    let (rows, cols) = dense.matrix("the matrix")?;
    let wide = for_floats!(dtype, "the matrix", widened::<T>(&dense, "the matrix"))?;
    let matrix = MatrixRef::new(rows, cols, &wide)?;
    let (found, row_scales) = on_torch_threads(|| quantize(matrix))?;
    let mut values = Tensor::empty(&[rows as i64, cols as i64], ScalarType::I8)?;
    values.elements_mut::<i8>()?.copy_from_slice(&found);
    let mut scales = Tensor::empty(&[rows as i64], ScalarType::F32)?;
    scales.elements_mut::<f32>()?.copy_from_slice(&row_scales);
    Ok((values, scales))
}

/// The elements of a tensor in f32.
fn widened<'a, T: Float>(x: &'a Tensor, what: &str) -> Result<Cow<'a, [f32]>> {
    if T::SCALAR == ScalarType::F32 {
        return x.elements(what, ScalarType::F32);
    }
    Ok(Cow::Owned(x.elements::<T>(what, T::SCALAR)?.iter().map(|v| v.to_f32()).collect()))
}

/// `y = x · Wᵀ` for floats `x`, quantized for each token, and a weight of integers with a scale for each row.
pub(super) fn linear_quantized(x: Tensor, packed: Tensor, scales: Tensor, out_features: i64) -> Result<Tensor> {
    dynamic(&x, &packed, &scales, None, out_features, Activation::Identity)
}

/// The same with a bias and an activation.
pub(super) fn linear_quantized_bias(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    bias: Tensor,
    out_features: i64,
    number: i64,
) -> Result<Tensor> {
    dynamic(&x, &packed, &scales, Some(&bias), out_features, activation(number)?)
}

fn dynamic(
    x: &Tensor,
    packed: &Tensor,
    scales: &Tensor,
    bias: Option<&Tensor>,
    out_features: i64,
    activation: Activation,
) -> Result<Tensor> {
    let dtype = x.dtype()?;
    let rows = dimension("out_features", out_features)?;
    let (tokens, cols) = rows_and_last(x, "the input")?;
    expect_packed(packed, packed_len(rows, cols)?, ScalarType::I8, (rows, cols), x)?;
    let memory = linear::Memory::of(packed.bytes("the packed weight")?);
    let (strips, sums) = memory.split_at(packed_bytes::<i8>(rows, cols)?);
    let sums: Vec<i32> = bytemuck::pod_collect_to_vec(sums);
    let scales = scales.elements::<f32>("the scales", ScalarType::F32)?;
    let weight = SparseWeightI8Ref::with_sums((rows, cols), strips, &scales, &sums)?;
    let bias = bias.map(|bias| linear::widened(bias, dtype)).transpose()?;
    let epilogue = Epilogue { bias: bias.as_deref(), activation };
    let values = for_floats!(dtype, "the input", widened::<T>(x, "the input"))?;
    let mut y = with_last(x, Device::HOST, out_features, dtype)?;
    if dtype == ScalarType::F32 {
        on_torch_threads(|| weight.linear(&values, tokens, epilogue, y.elements_mut()?).map_err(Failure::from))?;
        return Ok(y);
    }
    let mut wide = vec![0f32; tokens * rows];
    on_torch_threads(|| weight.linear(&values, tokens, epilogue, &mut wide))?;
    match dtype {
        ScalarType::Bf16 => narrow(&wide, y.elements_mut::<bf16>()?, bf16::from_f32),
        _ => narrow(&wide, y.elements_mut::<f16>()?, f16::from_f32),
    }
    Ok(y)
}

fn narrow<T>(from: &[f32], to: &mut [T], round: impl Fn(f32) -> T) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = round(*from));
}

/// `y = x · Wᵀ` of integers, exact, in int32.
pub(super) fn linear_i8(x: Tensor, packed: Tensor, out_features: i64) -> Result<Tensor> {
    let rows = dimension("out_features", out_features)?;
    let (tokens, cols) = rows_and_last(&x, "the input")?;
    expect_packed(&packed, packed_len(rows, cols)?, ScalarType::I8, (rows, cols), &x)?;
    let values = x.elements::<i8>("the input", ScalarType::I8)?;
    let memory = linear::Memory::of(packed.bytes("the packed weight")?);
    let (strips, sums) = memory.split_at(packed_bytes::<i8>(rows, cols)?);
    let (scales, sums) = (vec![1.0; rows], bytemuck::pod_collect_to_vec::<u8, i32>(sums));
    let weight = SparseWeightI8Ref::with_sums((rows, cols), strips, &scales, &sums)?;
    let mut y = with_last(&x, Device::HOST, out_features, ScalarType::I32)?;
    on_torch_threads(|| weight.product(&values, tokens, y.elements_mut()?).map_err(Failure::from))?;
    Ok(y)
}
