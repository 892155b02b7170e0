//! Dtypes by the names that numpy, `ml_dtypes` and torch have for them.

use std::borrow::Cow;

use bytemuck::Pod;
use pyo3::{exceptions::PyTypeError, prelude::*};
use twofour::DType;

const NAMES: [(&str, DType); 6] = [
    ("float32", DType::F32),
    ("float16", DType::F16),
    ("bfloat16", DType::BF16),
    ("int8", DType::I8),
    ("float8_e4m3fn", DType::F8E4M3),
    ("float8_e5m2", DType::F8E5M2),
];

/// The dtype of that name.
pub(super) fn named(name: &str) -> PyResult<DType> {
    NAMES.iter().find(|(n, _)| *n == name).map(|(_, dtype)| *dtype).ok_or_else(|| {
        let known: Vec<&str> = NAMES.iter().map(|(n, _)| *n).collect();
        PyTypeError::new_err(format!("dtype {name} cannot be pruned or compressed; supported: {}", known.join(", ")))
    })
}

/// The name of a dtype.
pub(super) fn name(dtype: DType) -> &'static str {
    // Every dtype is in the table.
    NAMES.iter().find(|(_, d)| *d == dtype).map_or(dtype.name(), |(n, _)| n)
}

/// The elements of bytes, copied where they are not aligned. A last part of an element is dropped: the length is checked against a shape.
pub(super) fn elements<T: Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    let whole = &bytes[..bytes.len() / size_of::<T>() * size_of::<T>()];
    match bytemuck::try_cast_slice(whole) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(bytemuck::allocation::pod_collect_to_vec(whole)),
    }
}

/// Calls a generic function with the Rust type of a dtype.
macro_rules! for_dtype {
    ($dtype:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            ::twofour::DType::F32 => $function::<f32>($($argument),*),
            ::twofour::DType::F16 => $function::<::half::f16>($($argument),*),
            ::twofour::DType::BF16 => $function::<::half::bf16>($($argument),*),
            ::twofour::DType::I8 => $function::<i8>($($argument),*),
            ::twofour::DType::F8E4M3 => $function::<::twofour::F8E4M3>($($argument),*),
            ::twofour::DType::F8E5M2 => $function::<::twofour::F8E5M2>($($argument),*),
        }
    };
}
pub(super) use for_dtype;

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
