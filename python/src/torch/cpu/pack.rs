//! Packing weights, and reading packed ones.

use half::{bf16, f16};
use twofour::{
    Compressed, Mask, MatrixRef,
    kernel::{SparseWeightMut, packed_bytes},
    layer::{MaskRule, remask},
};

use super::{Failure, Float, Result, ScalarType, Stored, Tensor, for_floats, for_stored, on_pool, select};
use crate::torch::{numbers, shape::dimension};

/// Chooses the mask of a weight by a rule and packs what it keeps, and its transpose where asked (otherwise an empty tensor), as `dtype` where that is
/// a number: floats of 16 bits for a weight of float32. A NaN is always found here. The mask is in tiles ([`select::to_tiles`]).
pub(super) fn pack(
    weight: Tensor,
    rule: i64,
    scale: f64,
    transpose: bool,
    _check: bool,
    dtype: i64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let found = weight.dtype()?;
    let dtype = numbers::packed_type(dtype, found)?;
    match (found, dtype) {
        (ScalarType::F32, ScalarType::Bf16) => by_rule::<bf16, f32>(&weight, rule, scale, transpose),
        (ScalarType::F32, ScalarType::F16) => by_rule::<f16, f32>(&weight, rule, scale, transpose),
        _ if found == dtype => for_floats!(found, "the weight", same_type::<T>(&weight, rule, scale, transpose)),
        _ => Err(Failure::not_implemented(format!(
            "a weight of {} cannot be packed as {}: convert it first",
            found.name(),
            dtype.name()
        ))),
    }
}

fn same_type<T: Float>(weight: &Tensor, rule: i64, scale: f64, transpose: bool) -> Result<(Tensor, Tensor, Tensor)> {
    by_rule::<T, T>(weight, rule, scale, transpose)
}

fn by_rule<T: Float, M: Float>(
    weight: &Tensor,
    rule: i64,
    scale: f64,
    transpose: bool,
) -> Result<(Tensor, Tensor, Tensor)> {
    let rule = numbers::rule(rule)?;
    let (rows, cols) = weight.matrix("the weight")?;
    let mut mask = Mask::empty(rows, cols);
    let (packed, packed_t) = packed_by::<T, M>(weight, rule, scale as f32, &mut mask, transpose)?;
    Ok((packed, packed_t, select::to_tiles(&mask)?))
}

/// Packs what a mask of tiles keeps of a weight, and its transpose where asked.
pub(super) fn pack_masked(weight: Tensor, mask: Tensor, transpose: bool) -> Result<(Tensor, Tensor)> {
    let dtype = weight.dtype()?;
    let (rows, cols) = weight.matrix("the weight")?;
    let mut mask = select::from_tiles(&mask, rows, cols)?;
    for_floats!(dtype, "the weight", given::<T>(&weight, &mut mask, transpose))
}

fn given<T: Float>(weight: &Tensor, mask: &mut Mask, transpose: bool) -> Result<(Tensor, Tensor)> {
    packed_by::<T, T>(weight, MaskRule::Given, 1.0, mask, transpose)
}

fn packed_by<T: Float, M: Float>(
    weight: &Tensor,
    rule: MaskRule,
    scale: f32,
    mask: &mut Mask,
    transpose: bool,
) -> Result<(Tensor, Tensor)> {
    let (rows, cols) = weight.matrix("the weight")?;
    if transpose && rule == MaskRule::Given {
        mask.verify(twofour::Pattern::TWO_FOUR, twofour::Axis::Column)?;
    }
    let values = weight.elements::<M>("the weight", M::SCALAR)?;
    let master = MatrixRef::new(rows, cols, &values)?;
    let mut packed = new_packed::<T>(rows, cols)?;
    let mut packed_t = if transpose { new_packed::<T>(cols, rows)? } else { Tensor::empty(&[0], T::SCALAR)? };
    let memory = packed.bytes_mut()?;
    let memory_t = if transpose { Some(packed_t.bytes_mut()?) } else { None };
    on_pool(|| {
        let packed = SparseWeightMut::<T>::new(rows, cols, memory)?;
        let transposed = memory_t.map(|memory| SparseWeightMut::<T>::new(cols, rows, memory)).transpose()?;
        remask(master, rule, scale, mask, packed, transposed)
    })??;
    Ok((packed, packed_t))
}

/// Packs a weight that is 2:4 along its rows already.
pub(super) fn pack_sparse(weight: Tensor) -> Result<Tensor> {
    let dtype = weight.dtype()?;
    for_stored!(dtype, "the weight", verified::<T>(&weight))
}

fn verified<T: Stored>(weight: &Tensor) -> Result<Tensor> {
    let (rows, cols) = weight.matrix("the weight")?;
    let values = weight.elements::<T>("the weight", T::STORED)?;
    let matrix = MatrixRef::new(rows, cols, &values)?;
    T::pack(&on_pool(|| Compressed::from_dense(matrix))??)
}

/// A new tensor for a packed weight: a row for each strip of sixteen rows.
fn new_packed<T: Float>(rows: usize, cols: usize) -> Result<Tensor> {
    let elements = packed_bytes::<T>(rows, cols)? / size_of::<T>();
    let strips = rows.div_ceil(16);
    Tensor::empty(&[strips as i64, elements.checked_div(strips).unwrap_or(0) as i64], T::SCALAR)
}

pub(super) fn packed_of<T: Float>(weight: &Compressed<T>) -> Result<Tensor> {
    let mut packed = new_packed::<T>(weight.rows(), weight.cols())?;
    let memory = packed.bytes_mut()?;
    on_pool(|| SparseWeightMut::<T>::new(weight.rows(), weight.cols(), memory)?.pack(weight))??;
    Ok(packed)
}

/// The dense weight of a packed one.
pub(super) fn unpack(packed: Tensor, rows: i64, cols: i64) -> Result<Tensor> {
    let dtype = packed.dtype()?;
    for_stored!(dtype, "the packed weight", dense::<T>(&packed, rows, cols))
}

fn dense<T: Stored>(packed: &Tensor, rows: i64, cols: i64) -> Result<Tensor> {
    let compressed = compressed::<T>(packed, rows, cols)?;
    let mut out = Tensor::empty(&[rows, cols], T::STORED)?;
    out.elements_mut::<T>()?.copy_from_slice(&compressed.to_dense());
    Ok(out)
}

fn compressed<T: Stored>(packed: &Tensor, rows: i64, cols: i64) -> Result<Compressed<T>> {
    T::unpack(packed, dimension("rows", rows)?, dimension("cols", cols)?)
}

/// The canonical form of a packed weight: values `[rows, 2 * groups]` and metadata `[rows, words]` of int32.
pub(super) fn canonical(packed: Tensor, rows: i64, cols: i64) -> Result<(Tensor, Tensor)> {
    let dtype = packed.dtype()?;
    for_stored!(dtype, "the packed weight", parts::<T>(&packed, rows, cols))
}

fn parts<T: Stored>(packed: &Tensor, rows: i64, cols: i64) -> Result<(Tensor, Tensor)> {
    let compressed = compressed::<T>(packed, rows, cols)?;
    let per_row = |len: usize| len.checked_div(rows as usize).unwrap_or(0) as i64;
    let mut values = Tensor::empty(&[rows, per_row(compressed.values().len())], T::STORED)?;
    values.elements_mut::<T>()?.copy_from_slice(compressed.values());
    let mut meta = Tensor::empty(&[rows, per_row(compressed.meta().len())], ScalarType::I32)?;
    meta.elements_mut::<u32>()?.copy_from_slice(compressed.meta());
    Ok((values, meta))
}

/// Packs a weight in canonical form.
pub(super) fn from_canonical(values: Tensor, meta: Tensor, cols: i64) -> Result<Tensor> {
    let dtype = values.dtype()?;
    for_stored!(dtype, "the values", from_parts::<T>(&values, &meta, cols))
}

fn from_parts<T: Stored>(values: &Tensor, meta: &Tensor, cols: i64) -> Result<Tensor> {
    let (rows, _) = values.matrix("the values")?;
    let cols = dimension("cols", cols)?;
    let values = values.elements::<T>("the values", T::STORED)?.into_owned();
    let meta = meta.elements::<u32>("the metadata", ScalarType::I32)?.into_owned();
    T::pack(&Compressed::from_parts(rows, cols, values, meta)?)
}
