//! Kernels for tensors of f32, f16 or bf16, whose sources are compiled for one data type each.

use super::headers;
use crate::{
    DataType, Error, Result,
    source::{File, Source, Support},
};

/// The data types.
pub const FLOAT_TYPES: [DataType; 3] = [DataType::F32, DataType::F16, DataType::BF16];

/// Returns an error for another data type.
///
/// # Errors
/// [`Error::DataType`].
pub fn expect_float_type(operation: &'static str, dtype: DataType) -> Result<()> {
    if FLOAT_TYPES.contains(&dtype) {
        return Ok(());
    }
    Err(Error::DataType { operation, dtype, supported: "f32, f16, bf16" })
}

/// Returns the source of a kernel for a data type. `files` follow the types and conversions of [`headers::COMMON`].
pub fn float_source(name: &str, dtype: DataType, files: impl IntoIterator<Item = File>) -> Source {
    Source::new(format!("{name}-{dtype}"), Support::ALL)
        .define(format!("#define ELEMENT {}\n", dtype.definition()))
        .with([headers::COMMON])
        .with(files)
}

/// Returns the source of a kernel over rows of a data type, with FMA. `files` follow [`headers::ROWS`].
pub fn row_source(name: &str, dtype: DataType, files: impl IntoIterator<Item = File>) -> Source {
    float_source(name, dtype, [headers::ROWS].into_iter().chain(files)).with_fma()
}
