//! To the canonical form and back.

use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::prelude::*;
use twofour::{Compressed, Element, MatrixRef, Result, match_element};

use super::{
    dtype::{self, elements, store},
    unlocked,
};

/// Writes the values and metadata of a matrix that is 2:4, or is to be pruned by magnitude, to `values` and `meta`.
/// `name`, where not empty, is the tensor's name in errors.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn compress(
    py: Python<'_>,
    matrix: PyReadonlyArray1<'_, u8>,
    dtype: &str,
    rows: usize,
    cols: usize,
    prune: bool,
    name: &str,
    mut values: PyReadwriteArray1<'_, u8>,
    mut meta: PyReadwriteArray1<'_, u8>,
) -> PyResult<()> {
    let dtype = dtype::named(dtype)?;
    let bytes = matrix.as_slice()?;
    let (values, meta) = (values.as_slice_mut()?, meta.as_slice_mut()?);
    unlocked(py, || {
        let result = match_element!(dtype, |T| from_dense::<T>(bytes, rows, cols, prune, values, meta));
        result.map_err(|e| if name.is_empty() { e } else { e.in_tensor(name) })
    })
}

fn from_dense<T: Element>(
    bytes: &[u8],
    rows: usize,
    cols: usize,
    prune: bool,
    values: &mut [u8],
    meta: &mut [u8],
) -> Result<()> {
    let dense = elements::<T>(bytes);
    let matrix = MatrixRef::new(rows, cols, &dense)?;
    let compressed = if prune { Compressed::from_pruned(matrix) } else { Compressed::from_dense(matrix) }?;
    put(&compressed, values, meta)
}

/// Writes the values and metadata of a weight in the format `sparse-24-bitmask`: its kept values and a bit for each
/// element.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn compress_bitmask(
    py: Python<'_>,
    kept: PyReadonlyArray1<'_, u8>,
    bitmask: PyReadonlyArray1<'_, u8>,
    dtype: &str,
    rows: usize,
    cols: usize,
    name: &str,
    mut values: PyReadwriteArray1<'_, u8>,
    mut meta: PyReadwriteArray1<'_, u8>,
) -> PyResult<()> {
    let dtype = dtype::named(dtype)?;
    let (kept, bitmask) = (kept.as_slice()?, bitmask.as_slice()?);
    let (values, meta) = (values.as_slice_mut()?, meta.as_slice_mut()?);
    unlocked(py, || {
        let result = match_element!(dtype, |T| from_bitmask::<T>(kept, bitmask, rows, cols, values, meta));
        result.map_err(|e| if name.is_empty() { e } else { e.in_tensor(name) })
    })
}

fn from_bitmask<T: Element>(
    kept: &[u8],
    bitmask: &[u8],
    rows: usize,
    cols: usize,
    values: &mut [u8],
    meta: &mut [u8],
) -> Result<()> {
    put(&Compressed::<T>::from_bitmask(rows, cols, &elements::<T>(kept), bitmask)?, values, meta)
}

fn put<T: Element>(compressed: &Compressed<T>, values: &mut [u8], meta: &mut [u8]) -> Result<()> {
    store("compressed values", compressed.values(), values)?;
    store("compressed metadata", compressed.meta(), meta)
}

/// Writes the dense matrix of values and metadata, whose rules are checked, to `out`.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn decompress(
    py: Python<'_>,
    values: PyReadonlyArray1<'_, u8>,
    meta: PyReadonlyArray1<'_, u8>,
    dtype: &str,
    rows: usize,
    cols: usize,
    mut out: PyReadwriteArray1<'_, u8>,
) -> PyResult<()> {
    let dtype = dtype::named(dtype)?;
    let (values, meta) = (values.as_slice()?, meta.as_slice()?);
    let out = out.as_slice_mut()?;
    unlocked(py, || match_element!(dtype, |T| to_dense::<T>(values, meta, rows, cols, out)))
}

fn to_dense<T: Element>(values: &[u8], meta: &[u8], rows: usize, cols: usize, out: &mut [u8]) -> Result<()> {
    store("dense matrix", &parts::<T>(values, meta, rows, cols)?.to_dense(), out)
}

/// The weight of values and metadata, after checking every rule of the form.
pub(super) fn parts<T: Element>(values: &[u8], meta: &[u8], rows: usize, cols: usize) -> Result<Compressed<T>> {
    Compressed::from_parts(rows, cols, elements::<T>(values).into_owned(), elements::<u32>(meta).into_owned())
}
