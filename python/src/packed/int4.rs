//! The canonical form of int4 weights, as tensors: the same on every device.
//!
//! `values` `[rows, groups]` of uint8: the two kept integers of a group, each plus 8, the first in the lower half.
//! `meta` `[rows, words]` of int32, as for floats. `scales` `[rows, 1]` or `[rows, columns / 128]` of float16.

use half::f16;
use twofour::int4::{Granularity, Int4};

use crate::{
    names,
    torch::{Device, Failure, Result, ScalarType, Tensor},
};

/// Values, metadata and scales of a weight, in the host's memory.
pub(crate) fn to_tensors(weight: &Int4) -> Result<(Tensor, Tensor, Tensor)> {
    let q = weight.weight();
    let (rows, groups) = (q.rows(), q.groups());
    let per_row = |len: usize| len.checked_div(rows).unwrap_or(0) as i64;
    let mut values = Tensor::empty(&[rows as i64, groups as i64], ScalarType::U8)?;
    values.bytes_mut()?.copy_from_slice(&weight.packed_values());
    let mut meta = Tensor::empty(&[rows as i64, per_row(q.meta().len())], ScalarType::I32)?;
    meta.elements_mut::<u32>()?.copy_from_slice(q.meta());
    let mut scales = Tensor::empty(&[rows as i64, per_row(weight.scales().len())], ScalarType::F16)?;
    scales.elements_mut::<f16>()?.copy_from_slice(weight.scales());
    Ok((values, meta, scales))
}

/// The weight of values, metadata and scales.
///
/// # Errors
/// A `RuntimeError` for shapes, types or contents that are no weight.
pub(crate) fn from_tensors(
    (values, meta, scales): (&Tensor, &Tensor, &Tensor),
    cols: usize,
    granularity: Granularity,
) -> Result<Int4> {
    let (rows, groups) = values.matrix("the values")?;
    let (expected, group_size) = ((rows, granularity.scales_per_row(cols)), names::group_size(granularity));
    if groups != cols.div_ceil(4) || scales.matrix("the scales")? != expected {
        return Err(Failure::runtime(format!(
            "an int4 weight of shape {:?} with group_size {group_size} has values {:?} and scales {expected:?}, not \
             {:?} and {:?}",
            (rows, cols),
            (rows, cols.div_ceil(4)),
            (rows, groups),
            scales.sizes()
        )));
    }
    let host = |tensor: &Tensor, what: &str| tensor.copied_to(Device::HOST, what);
    let (values, meta, scales) =
        (host(values, "the values")?, host(meta, "the metadata")?, host(scales, "the scales")?);
    let values = values.elements::<u8>("the values", ScalarType::U8)?;
    let meta = meta.elements::<u32>("the metadata", ScalarType::I32)?.into_owned();
    let scales = scales.elements::<f16>("the scales", ScalarType::F16)?.into_owned();
    Ok(Int4::from_packed(rows, cols, &values, meta, scales, granularity)?)
}
