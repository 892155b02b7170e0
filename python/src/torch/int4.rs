//! The canonical form of int4 weights, as tensors: the same on every device.
//!
//! `values` `[rows, groups]` of uint8: the two kept integers of a group, each plus 8, the first in the lower half. `meta` `[rows, words]` of int32, as
//! for floats. `scales` `[rows, 1]` or `[rows, columns / 128]` of float16.

use half::f16;
use twofour::int4::{GROUP, Granularity, Int4};

use super::{
    failure::{Failure, Result},
    scalar_type::ScalarType,
    shape::dimension,
    tensor::{Device, Tensor},
};
use crate::names;

/// What shares a scale: 128 columns, or a row for -1.
///
/// # Errors
/// A `RuntimeError` for another number.
pub(super) fn granularity(group_size: i64) -> Result<Granularity> {
    // Groups of 64 columns are for files and this crate's CPU layers: GPU kernels do not have them.
    names::granularity(group_size).filter(|granularity| *granularity != Granularity::Group64).ok_or_else(|| {
        Failure::runtime(format!(
            "group_size is {group_size}: an int4 weight has a scale for each {GROUP} columns of a row ({GROUP}) or for each row (-1)"
        ))
    })
}

/// Values, metadata and scales of a weight, in the host's memory.
pub(super) fn to_tensors(weight: &Int4) -> Result<(Tensor, Tensor, Tensor)> {
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
pub(super) fn from_tensors(
    (values, meta, scales): (&Tensor, &Tensor, &Tensor),
    cols: i64,
    group_size: i64,
) -> Result<Int4> {
    let (granularity, cols) = (granularity(group_size)?, dimension("cols", cols)?);
    let (rows, groups) = values.matrix("the values")?;
    let expected = (rows, granularity.scales_per_row(cols));
    if groups != cols.div_ceil(4) || scales.matrix("the scales")? != expected {
        return Err(Failure::runtime(format!(
            "an int4 weight of shape {:?} with group_size {group_size} has values {:?} and scales {expected:?}, not {:?} and {:?}",
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
