//! Kernels for tensors of f32, f16 or bf16, whose sources are compiled for one data type each.

use super::headers;
use crate::{
    DataType, Device, Error, Result,
    device::Kernel,
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

/// A source that is compiled for each of [`FLOAT_TYPES`].
#[derive(Debug, Clone)]
pub struct FloatSource {
    /// The beginning of the sources' names.
    pub name: &'static str,
    /// What the kernels do, for the error about another data type.
    pub operation: &'static str,
    /// Whether [`row_source`] makes it, which allows FMA and knows the helpers for rows, or [`float_source`].
    pub contracts_fma: bool,
    /// The files, the last with the kernels.
    pub files: &'static [File],
}

impl FloatSource {
    fn of(&self, dtype: DataType) -> Source {
        let source = if self.contracts_fma { row_source } else { float_source };
        source(self.name, dtype, self.files)
    }

    /// Returns the source for each data type.
    pub fn all(&self) -> [Source; 3] {
        FLOAT_TYPES.map(|dtype| self.of(dtype))
    }

    /// Returns what loads the kernels for a data type by their names.
    ///
    /// # Errors
    /// [`Error::DataType`] for another data type than f32, f16 and bf16.
    pub fn load(&self, device: &Device, dtype: DataType) -> Result<impl Fn(&str) -> Result<Kernel>> {
        expect_float_type(self.operation, dtype)?;
        let source = self.of(dtype);
        Ok(move |name: &str| device.kernel(&source, name))
    }
}

/// Returns the source of a kernel for a data type. `files` follow the types and conversions of [`headers::COMMON`].
pub fn float_source(name: &str, dtype: DataType, files: &[File]) -> Source {
    Source::new(format!("{name}-{dtype}"), Support::ALL)
        .define(format!("#define ELEMENT {}\n", dtype.definition()))
        .with([headers::COMMON])
        .with(files.iter().cloned())
}

/// Returns the source of a kernel over rows of a data type, with FMA. `files` follow [`headers::ROWS`].
pub fn row_source(name: &str, dtype: DataType, files: &[File]) -> Source {
    float_source(name, dtype, &[headers::ROWS]).with(files.iter().cloned()).with_fma()
}
