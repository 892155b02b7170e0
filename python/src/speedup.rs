//! What a measured speedup says.

use pyo3::prelude::*;
use twofour::speedup::{Interval, Verdict};

/// `"faster"`, `"slower"`, `"as fast"` or `"too noisy"`, for the median of a speedup and the ends of an interval that
/// is likely to contain the true one.
#[pyfunction]
fn verdict(median: f64, low: f64, high: f64) -> &'static str {
    Verdict::of(Interval { median, low, high }).name()
}

/// Adds the function to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(verdict, module)?)
}
