//! Weights of 4-bit integers.

use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::{exceptions::PyValueError, prelude::*};
use twofour::{
    Result,
    int4::{Granularity, Int4},
};

use super::{
    dtype::{elements, store},
    unlocked,
};
use crate::names;

/// What shares a scale, of a number.
pub(super) fn granularity(group_size: i64) -> PyResult<Granularity> {
    names::granularity(group_size).ok_or_else(|| {
        PyValueError::new_err(format!("group_size is {group_size}; use 128 or 64, or -1 for a scale for each row"))
    })
}

/// Writes the dense float32 matrix of values, metadata and float16 scales, whose rules are checked, to `out`: integers
/// times scales.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn decompress_int4(
    py: Python<'_>,
    values: PyReadonlyArray1<'_, u8>,
    meta: PyReadonlyArray1<'_, u8>,
    scales: PyReadonlyArray1<'_, u8>,
    rows: usize,
    cols: usize,
    group_size: i64,
    mut out: PyReadwriteArray1<'_, u8>,
) -> PyResult<()> {
    let granularity = granularity(group_size)?;
    let (values, meta, scales) = (values.as_slice()?, meta.as_slice()?, scales.as_slice()?);
    let out = out.as_slice_mut()?;
    unlocked(py, || {
        let weight = weight(rows, cols, granularity, values, meta, scales)?;
        store("dense matrix", &weight.dequantize().to_dense(), out)
    })
}

/// The weight of the bytes of its parts, after checking every rule of the form.
pub(super) fn weight(
    rows: usize,
    cols: usize,
    granularity: Granularity,
    values: &[u8],
    meta: &[u8],
    scales: &[u8],
) -> Result<Int4> {
    let (meta, scales) = (elements::<u32>(meta).into_owned(), elements::<half::f16>(scales).into_owned());
    Int4::from_packed(rows, cols, values, meta, scales, granularity)
}
