//! Weights of 8-bit integers on a CPU.
//!
//! A packed one is a run of bytes: strips as for floats, then an i32 for each row, the sum of its values.

use std::borrow::Cow;

use twofour::{
    Compressed,
    kernel::{SparseWeightI8Ref, pack_i8, packed_bytes},
};

use super::Stored;
use crate::{
    cpu::{Memory, on_pool},
    torch::{Failure, Result, ScalarType, Tensor, operands::expect_packed},
};

impl Stored for i8 {
    const STORED: ScalarType = ScalarType::I8;

    fn pack(weight: &Compressed<i8>) -> Result<Tensor> {
        let (rows, cols) = (weight.rows(), weight.cols());
        let mut packed = Tensor::empty(&[packed_len(rows, cols)? as i64], ScalarType::I8)?;
        let (strips, sums) = packed.bytes_mut()?.split_at_mut(packed_bytes::<i8>(rows, cols)?);
        let found = on_pool(|| pack_i8(weight, strips))??;
        sums.copy_from_slice(bytemuck::cast_slice(&found));
        Ok(packed)
    }

    fn unpack(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<i8>> {
        let (found, expected) = (packed.numel(), packed_len(rows, cols)?);
        if found != expected {
            return Err(Failure::runtime(format!(
                "a packed int8 weight of shape {:?} has {expected} elements, and the tensor has {found}",
                (rows, cols)
            )));
        }
        with_weight(packed, (rows, cols), None, |weight| Ok(weight.to_compressed()))
    }
}

/// Elements of a packed weight.
fn packed_len(rows: usize, cols: usize) -> Result<usize> {
    Ok(packed_bytes::<i8>(rows, cols)? + 4 * rows)
}

/// Calls a function with the weight that an operand is multiplied by, without scales with the integers alone.
///
/// # Errors
/// Where the packed weight has not that shape; those of `f`.
pub(crate) fn multiplied<R>(
    x: &Tensor,
    packed: &Tensor,
    shape: (usize, usize),
    scales: Option<&[f32]>,
    f: impl FnOnce(SparseWeightI8Ref<'_>) -> Result<R>,
) -> Result<R> {
    expect_packed(packed, packed_len(shape.0, shape.1)?, ScalarType::I8, shape, x)?;
    with_weight(packed, shape, scales, f)
}

fn with_weight<R>(
    packed: &Tensor,
    (rows, cols): (usize, usize),
    scales: Option<&[f32]>,
    f: impl FnOnce(SparseWeightI8Ref<'_>) -> Result<R>,
) -> Result<R> {
    let memory = Memory::of(packed)?;
    let (strips, sums) = memory.split_at(packed_bytes::<i8>(rows, cols)?);
    let sums: Vec<i32> = bytemuck::pod_collect_to_vec(sums);
    let scales = scales.map_or_else(|| Cow::Owned(vec![1.0; rows]), Cow::Borrowed);
    f(SparseWeightI8Ref::with_sums((rows, cols), strips, &scales, &sums)?)
}
