//! Errors of kernels, as Python sees them.

use std::ffi::CString;

/// The result of a kernel.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// An error with the Python exception that it becomes. torch's dispatcher can only throw a `RuntimeError`, so the
/// message begins with the exception's name in brackets; the package's Python side raises that exception instead.
#[derive(Debug)]
pub(crate) struct Failure {
    exception: &'static str,
    message: String,
}

impl Failure {
    /// A `RuntimeError`: torch's choice for shapes, layouts and devices.
    pub(crate) fn runtime(message: impl Into<String>) -> Self {
        Failure { exception: "RuntimeError", message: message.into() }
    }

    /// A `ValueError`: contents that cannot be taken.
    pub(crate) fn value(message: impl Into<String>) -> Self {
        Failure { exception: "ValueError", message: message.into() }
    }

    /// A `NotImplementedError`: torch's choice for combinations of types.
    pub(crate) fn not_implemented(message: impl Into<String>) -> Self {
        Failure { exception: "NotImplementedError", message: message.into() }
    }

    /// The message as torch throws it.
    pub(crate) fn into_message(self) -> CString {
        let text = format!("[{}] {}", self.exception, self.message);
        CString::new(text.replace('\0', " ")).unwrap_or_default()
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<twofour::Error> for Failure {
    fn from(error: twofour::Error) -> Self {
        use twofour::Error as E;
        let message = error.to_string();
        match error {
            E::NotANumber { .. } | E::Infinite { .. } | E::TooManyKept { .. } | E::Scale { .. } => {
                Failure::value(message)
            }
            E::UnsupportedDType { .. } => Failure::not_implemented(message),
            _ => Failure::runtime(message),
        }
    }
}
