//! Which tensors of a model are weights that are worth pruning.

use pyo3::prelude::*;
use twofour::role::{Role, Roles};

/// Why each tensor of a model is not to be pruned; `None` for the weights of linear layers that are.
///
/// `tensors` are the names and shapes of all of them; `has_conv1d` says that some layers are transformers' `Conv1D`.
#[pyfunction]
fn reasons_to_stay_dense(tensors: Vec<(String, Vec<usize>)>, has_conv1d: bool) -> Vec<Option<String>> {
    let roles = Roles::new(tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())), has_conv1d);
    let reason = |(name, shape): &(String, Vec<usize>)| match roles.of(name, shape) {
        Role::Linear => None,
        role => Some(role.to_string()),
    };
    tensors.iter().map(reason).collect()
}

/// Adds the function to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(reasons_to_stay_dense, module)?)
}
