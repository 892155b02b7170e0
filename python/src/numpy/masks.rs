//! Checking and pruning dense matrices.

use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::{exceptions::PyValueError, prelude::*};
use twofour::{
    Axis, Element, MatrixRef, Pattern, Result,
    select::{self, Transposable},
    verify::{census, conformance},
};

use super::{
    dtype::{self, elements, for_dtype, store},
    errors::exception,
    unlocked,
};

/// Groups, groups that violate the pattern, the first of those as (line, group, nonzeros), and zeros.
type Conformity = (usize, usize, Vec<(usize, usize, usize)>, usize);

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
    unlocked(py, || for_dtype!(dtype, conformity(bytes, rows, cols, pattern, axis, places)))
}

fn conformity<T: Element>(
    bytes: &[u8],
    rows: usize,
    cols: usize,
    pattern: Pattern,
    axis: Axis,
    places: usize,
) -> Result<Conformity> {
    let values = elements::<T>(bytes);
    let found = conformance(MatrixRef::new(rows, cols, &values)?, pattern, axis, places);
    let census = census(&values);
    let places = found.violations.iter().map(|v| (v.line, v.group, v.kept)).collect();
    Ok((found.groups, found.violation_count, places, census.elements - census.nonzeros))
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
    let rule = rule(method, pattern)?;
    let bytes = matrix.as_slice()?;
    let out = out.as_slice_mut()?;
    unlocked(py, || for_dtype!(dtype, pruned(bytes, rows, cols, pattern, axis, rule, out)))
}

fn pruned<T: Element>(
    bytes: &[u8],
    rows: usize,
    cols: usize,
    pattern: Pattern,
    axis: Axis,
    rule: Option<Transposable>,
    out: &mut [u8],
) -> Result<()> {
    let values = elements::<T>(bytes);
    let matrix = MatrixRef::new(rows, cols, &values)?;
    let mask = match rule {
        Some(rule) => select::transposable(matrix, rule)?,
        None => select::magnitude(matrix, pattern, axis)?,
    };
    store("pruned matrix", &mask.apply(matrix)?, out)
}

/// The rule for tiles that a method names; none for magnitude.
fn rule(method: &str, pattern: Pattern) -> PyResult<Option<Transposable>> {
    if method == "magnitude" {
        return Ok(None);
    }
    let Some(rule) = Transposable::ALL.into_iter().find(|rule| rule.name() == method) else {
        let known = Transposable::ALL.map(Transposable::name).join(", ");
        return Err(PyValueError::new_err(format!("unknown method {method:?}; known are magnitude, {known}")));
    };
    if pattern != Pattern::TWO_FOUR {
        return Err(PyValueError::new_err(format!(
            "method {method} chooses masks that are 2:4 both ways, not {pattern}; use method \"magnitude\""
        )));
    }
    Ok(Some(rule))
}

fn parse(pattern: &str) -> PyResult<Pattern> {
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
