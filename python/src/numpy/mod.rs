//! Files, masks and compression for Python, without torch.
//!
//! A matrix comes as a one-dimensional array of its bytes, row-major, with the name of its dtype; results are written
//! to arrays that the caller has made. So numpy arrays of any dtype and torch's tensors in the host's memory take the
//! same way, and neither is copied. Python's lock is released while a function computes, and the caller must not change
//! the arrays meanwhile.

mod compression;
mod dtype;
mod errors;
mod int4;
mod int8;
mod layer_inputs;
mod masks;
mod reader;
mod stores;
mod writer;

use pyo3::{exceptions::PyRuntimeError, prelude::*};

use crate::pool;

/// Adds the functions and classes to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(masks::verify, module)?)?;
    module.add_function(wrap_pyfunction!(masks::prune, module)?)?;
    module.add_function(wrap_pyfunction!(compression::compress, module)?)?;
    module.add_function(wrap_pyfunction!(compression::compress_bitmask, module)?)?;
    module.add_function(wrap_pyfunction!(compression::decompress, module)?)?;
    module.add_function(wrap_pyfunction!(int4::decompress_int4, module)?)?;
    module.add_function(wrap_pyfunction!(stores::store_of_dense, module)?)?;
    module.add_function(wrap_pyfunction!(stores::store_converted, module)?)?;
    module.add_function(wrap_pyfunction!(stores::store_to_dense, module)?)?;
    module.add_function(wrap_pyfunction!(stores::store_linear, module)?)?;
    module.add_class::<layer_inputs::LayerInputs>()?;
    module.add_class::<reader::FileReader>()?;
    module.add_class::<writer::FileWriter>()
}

/// Computes on every core, without Python's lock.
fn unlocked<R: Send>(py: Python<'_>, f: impl FnOnce() -> twofour::Result<R> + Send) -> PyResult<R> {
    py.detach(|| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        pool::on_pool(threads, f)
    })
    .map_err(|e| PyRuntimeError::new_err(format!("no threads: {e}")))?
    .map_err(errors::exception)
}
