//! The native part of the Python package `twofour`.
//!
//! | module | holds |
//! |---|---|
//! | [`torch`] | kernels as operators of torch's dispatcher |
//! | [`numpy`] | files, masks and compression over arrays of bytes, without torch |
//! | [`pool`] | the threads that they compute on |
//!
//! Everything with a name for users is in the package's Python files; this crate binds.

mod numpy;
mod pool;
mod torch;

use std::ffi::OsString;

use pyo3::{exceptions::PyImportError, prelude::*};

/// Defines `torch.ops.twofour` in the torch whose `libtorch_cpu` is at this path. A second call does nothing.
#[pyfunction]
fn register_torch(libtorch_cpu: OsString) -> PyResult<()> {
    torch::register(&libtorch_cpu).map_err(PyImportError::new_err)
}

/// The engine that multiplies on this CPU.
#[pyfunction]
fn engine() -> PyResult<&'static str> {
    let engine = twofour::kernel::Engine::best();
    engine.map(|e| e.name()).map_err(|e| pyo3::exceptions::PyRuntimeError::new_err(e.to_string()))
}

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(register_torch, module)?)?;
    module.add_function(wrap_pyfunction!(engine, module)?)?;
    numpy::add_to(module)
}
