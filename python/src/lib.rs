//! The native part of the Python package `twofour`.
//!
//! | module | holds |
//! |---|---|
//! | [`torch`] | kernels as operators of torch's dispatcher |
//! | [`numpy`] | files, masks and compression over arrays of bytes, without torch |
//! | [`names`] | the names of data types, mask rules, estimators and activations |
//! | [`phase_switch`] | when STEP switches from dense to sparse training |
//! | [`roles`] | which weights of a model are worth pruning |
//! | [`pool`] | the threads that they compute on |
//!
//! Everything with a name for users is in the package's Python files; this crate binds.

mod names;
mod numpy;
mod phase_switch;
mod pool;
mod roles;
mod torch;

use std::{ffi::OsString, path::PathBuf};

use pyo3::{
    exceptions::{PyImportError, PyValueError},
    prelude::*,
};
use twofour_cuda::TileScheduler;

/// Registers the kernels of `torch.ops.twofour` with the torch whose libraries are at these paths.
///
/// Returns the schemas to define; a second call does nothing and returns none.
#[pyfunction]
#[pyo3(signature = (libtorch_cpu, libtorch_cuda=None))]
fn register_torch(libtorch_cpu: OsString, libtorch_cuda: Option<OsString>) -> PyResult<Vec<&'static str>> {
    torch::register(&libtorch_cpu, libtorch_cuda.as_deref()).map_err(PyImportError::new_err)
}

/// Adds a `site-packages` folder in which NVRTC and NVIDIA's other libraries are searched.
#[pyfunction]
fn add_site_packages(folder: PathBuf) {
    twofour_cuda::libraries::add_site_packages(folder);
}

/// Sets how the tiles of large GEMMs are assigned to a GPU's thread blocks, `"persistent"` or `"hardware"`, from the next call on and for all devices.
#[pyfunction]
fn set_tile_scheduler(scheduler: &str) -> PyResult<()> {
    torch::set_tile_scheduler(match scheduler {
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
    module.add_function(wrap_pyfunction!(add_site_packages, module)?)?;
    module.add_function(wrap_pyfunction!(set_tile_scheduler, module)?)?;
    module.add_function(wrap_pyfunction!(engine, module)?)?;
    names::add_to(module)?;
    roles::add_to(module)?;
    module.add_class::<phase_switch::StepSwitch>()?;
    numpy::add_to(module)
}
