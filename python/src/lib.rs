//! The native part of the Python package `twofour`.
//!
//! | module | holds |
//! |---|---|
//! | [`ops`] | the operators of `torch.ops.twofour`: each with its kernels and the shapes of its results |
//! | [`packed`], [`cpu`], [`cuda`] | what they share: packed weights, and tensors in the memory of a kind of device |
//! | [`torch`] | torch's dispatcher and tensors |
//! | [`numpy`] | files, masks and compression over arrays of bytes, without torch |
//! | [`names`] | the names of data types, mask rules, estimators and activations |
//! | [`phase_switch`] | when STEP switches from dense to sparse training |
//! | [`roles`] | which weights of a model are worth pruning |
//! | [`speedup`] | what a measured speedup says |
//! | [`pool`] | the threads that they compute on |
//!
//! Everything with a name for users is in the package's Python files; this crate binds.

mod cpu;
mod cuda;
mod names;
mod numpy;
mod ops;
mod packed;
mod phase_switch;
mod pool;
mod roles;
mod speedup;
mod torch;

use std::{ffi::OsString, path::PathBuf};

use pyo3::{
    exceptions::{PyImportError, PyValueError},
    prelude::*,
    types::PyTuple,
};
use twofour_cuda::TileScheduler;

/// Registers the kernels of `torch.ops.twofour` with the torch whose libraries are at these paths.
///
/// Returns of each operator the schema to define, whether the leading dimensions of its first argument are rows,
/// whether it is a GEMM, and whether it has [`result_shapes`]; a second call does nothing and returns none.
#[pyfunction]
#[pyo3(signature = (libtorch_cpu, libtorch_cuda=None))]
fn register_torch(
    libtorch_cpu: OsString,
    libtorch_cuda: Option<OsString>,
) -> PyResult<Vec<(&'static str, bool, bool, bool)>> {
    let operators = ops::all();
    let new = torch::register(&operators, &libtorch_cpu, libtorch_cuda.as_deref()).map_err(PyImportError::new_err)?;
    let described = operators.iter().filter(|_| new);
    Ok(described.map(|o| (o.schema, o.by_rows, o.is_product, o.shapes.is_some())).collect())
}

/// The sizes and the dtype's name, or `None` for that of the first argument, of each result of an operator with these
/// arguments, all of its schema. Sizes may be torch's symbols.
#[pyfunction]
fn result_shapes<'py>(
    operator: &str,
    arguments: Bound<'py, PyTuple>,
) -> PyResult<Vec<(Bound<'py, PyTuple>, Option<&'static str>)>> {
    let py = arguments.py();
    let found = ops::all().into_iter().find(|o| o.name() == operator).and_then(|o| o.shapes);
    let shapes = found.ok_or_else(|| PyValueError::new_err(format!("no shapes are known of {operator:?}")))?;
    let results = shapes(&torch::shapes::Arguments(arguments))?;
    results.into_iter().map(|result| result.into_python(py)).collect()
}

/// Adds a `site-packages` folder in which NVRTC and NVIDIA's other libraries are searched.
#[pyfunction]
fn add_site_packages(folder: PathBuf) {
    twofour_cuda::add_site_packages(folder);
}

/// Sets how the tiles of large GEMMs are assigned to a GPU's thread blocks, `"persistent"` or `"hardware"`, from the
/// next call on and for all devices.
#[pyfunction]
fn set_tile_scheduler(scheduler: &str) -> PyResult<()> {
    cuda::set_tile_scheduler(match scheduler {
        "persistent" => TileScheduler::Persistent,
        "hardware" => TileScheduler::Hardware,
        other => {
            return Err(PyValueError::new_err(format!(
                "scheduler must be 'persistent' or 'hardware', and is {other:?}"
            )));
        }
    });
    Ok(())
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
    module.add_function(wrap_pyfunction!(result_shapes, module)?)?;
    module.add_function(wrap_pyfunction!(add_site_packages, module)?)?;
    module.add_function(wrap_pyfunction!(set_tile_scheduler, module)?)?;
    module.add_function(wrap_pyfunction!(engine, module)?)?;
    names::add_to(module)?;
    roles::add_to(module)?;
    speedup::add_to(module)?;
    module.add_class::<phase_switch::StepSwitch>()?;
    numpy::add_to(module)
}
