//! The crate's errors as Python's exceptions.

use pyo3::{
    exceptions::{PyFileExistsError, PyFileNotFoundError, PyKeyError, PyTypeError, PyValueError},
    prelude::*,
};
use twofour::Error;

/// The exception of an error: `OSError` and its kin for what the system refuses, `TypeError` for dtypes, `KeyError` for
/// names that a file lacks, `ValueError` for contents.
pub(super) fn exception(error: Error) -> PyErr {
    let message = error.to_string();
    let mut innermost = error;
    while let Error::InTensor { source, .. } | Error::InFile { source, .. } = innermost {
        innermost = *source;
    }
    match innermost {
        Error::Io { source, .. } => std::io::Error::new(source.kind(), message).into(),
        Error::Exists { path } => {
            PyFileExistsError::new_err(format!("{}: already exists; pass overwrite=True to replace it", path.display()))
        }
        Error::MissingShard { .. } => PyFileNotFoundError::new_err(message),
        Error::UnsupportedDType { .. } | Error::WrongDType { .. } => PyTypeError::new_err(message),
        Error::NoTensor { .. } => PyKeyError::new_err(message),
        _ => PyValueError::new_err(message),
    }
}
