//! Data types by their names in Python ([`crate::names`]), and elements from bytes.

use std::borrow::Cow;

use bytemuck::Pod;
use pyo3::{exceptions::PyTypeError, prelude::*};
use twofour::DataType;

use crate::names;

/// The data type of that name.
pub(super) fn named(name: &str) -> PyResult<DataType> {
    names::of_weights(name).ok_or_else(|| {
        let known = names::all_of_weights().join(", ");
        PyTypeError::new_err(format!("dtype {name} cannot be pruned or compressed; supported: {known}"))
    })
}

/// The name of a data type.
pub(super) fn name(dtype: DataType) -> &'static str {
    names::of(dtype.into())
}

/// The elements of bytes, copied where they are not aligned. A last part of an element is dropped: the length is
/// checked against a shape.
pub(super) fn elements<T: Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    let whole = &bytes[..bytes.len() / size_of::<T>() * size_of::<T>()];
    match bytemuck::try_cast_slice(whole) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(bytemuck::allocation::pod_collect_to_vec(whole)),
    }
}

/// Copies elements to the bytes of an array of the caller's.
///
/// # Errors
/// [`twofour::Error::Length`] where the array has another length.
pub(super) fn store<T: Pod>(what: &'static str, elements: &[T], out: &mut [u8]) -> twofour::Result<()> {
    let bytes: &[u8] = bytemuck::cast_slice(elements);
    if bytes.len() != out.len() {
        return Err(twofour::Error::Length { what, expected: bytes.len(), found: out.len() });
    }
    out.copy_from_slice(bytes);
    Ok(())
}
