//! Checking and pruning dense matrices.

use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::{exceptions::PyValueError, prelude::*};
use twofour::{
    Axis, Element, MatrixRef, Result, Selector, match_element,
    select::Sparsity,
    verify::{Place as Part, census, conformance},
};

use super::{
    dtype::{self, elements, store},
    errors::exception,
    unlocked,
};

/// A violation: line, group, first row and column of a block, nonzeros, and how many may be.
type Place = (Option<usize>, Option<usize>, Option<usize>, Option<usize>, usize, usize);

/// Parts of the matrix, parts that violate the pattern, the first of those, and zeros.
type Conformity = (usize, usize, Vec<Place>, usize);

/// Checks a matrix against a pattern along axis 0 or 1.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn verify(
    py: Python<'_>,
    matrix: PyReadonlyArray1<'_, u8>,
    dtype: &str,
    rows: usize,
    cols: usize,
    pattern: &str,
    axis: usize,
    places: usize,
) -> PyResult<Conformity> {
    let (dtype, pattern, axis) = (dtype::named(dtype)?, parse(pattern)?, direction(axis)?);
    let bytes = matrix.as_slice()?;
    unlocked(py, || match_element!(dtype, |T| conformity::<T>(bytes, rows, cols, pattern, axis, places)))
}

fn conformity<T: Element>(
    bytes: &[u8],
    rows: usize,
    cols: usize,
    pattern: Sparsity,
    axis: Axis,
    places: usize,
) -> Result<Conformity> {
    let values = elements::<T>(bytes);
    let found = conformance(MatrixRef::new(rows, cols, &values)?, pattern, axis, places)?;
    let census = census(&values);
    let places = found.violations.iter().map(|v| place(v.place, v.nonzeros, v.allowed)).collect();
    Ok((found.parts, found.violation_count, places, census.elements - census.nonzeros))
}

fn place(place: Part, nonzeros: usize, allowed: usize) -> Place {
    let (line, group, row, col) = match place {
        Part::Group { line, group, .. } => (Some(line), Some(group), None, None),
        Part::Line { line, .. } => (Some(line), None, None, None),
        Part::Block { row, col } | Part::Vector { row, col, .. } => (None, None, Some(row), Some(col)),
        Part::Matrix => (None, None, None, None),
    };
    (line, group, row, col, nonzeros, allowed)
}

/// Writes the pruned matrix to `out`.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
pub(super) fn prune(
    py: Python<'_>,
    matrix: PyReadonlyArray1<'_, u8>,
    dtype: &str,
    rows: usize,
    cols: usize,
    pattern: &str,
    axis: usize,
    method: &str,
    mut out: PyReadwriteArray1<'_, u8>,
) -> PyResult<()> {
    let (dtype, pattern, axis) = (dtype::named(dtype)?, parse(pattern)?, direction(axis)?);
    let selector = Selector::named(method, pattern, axis).map_err(exception)?;
    let bytes = matrix.as_slice()?;
    let out = out.as_slice_mut()?;
    unlocked(py, || match_element!(dtype, |T| pruned::<T>(bytes, rows, cols, selector, out)))
}

fn pruned<T: Element>(bytes: &[u8], rows: usize, cols: usize, selector: Selector, out: &mut [u8]) -> Result<()> {
    let values = elements::<T>(bytes);
    let matrix = MatrixRef::new(rows, cols, &values)?;
    let mask = selector.mask(matrix)?;
    store("pruned matrix", &mask.apply(matrix)?, out)
}

pub(super) fn parse(pattern: &str) -> PyResult<Sparsity> {
    pattern.parse().map_err(exception)
}

/// The direction of groups along an axis of the matrix.
fn direction(axis: usize) -> PyResult<Axis> {
    match axis {
        0 => Ok(Axis::Column),
        1 => Ok(Axis::Row),
        _ => Err(PyValueError::new_err(format!("a matrix has axes 0 and 1, not {axis}"))),
    }
}
