//! What is refused.

use std::fmt::Display;

use burn::tensor::DType;

/// The result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What is refused.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A weight that is not 2:4, a NaN, a record whose metadata is no 2:4 weight's, each with its place.
    #[error("{0}")]
    Weight(std::sync::Arc<twofour::Error>),
    /// A tensor of another shape.
    #[error("{what} has shape {found:?}, and {expected:?} is required")]
    Shape {
        /// The tensor.
        what: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// The shape that is required.
        expected: Vec<usize>,
    },
    /// A tensor of a type that no kernel multiplies.
    #[error("{what} is {found:?}: F32, F16 or BF16 is required; cast it first")]
    DType {
        /// The tensor.
        what: &'static str,
        /// Its type.
        found: DType,
    },
    /// A parameter with an adapter, which a packed weight would lose.
    #[error(
        "{what} of a 2:4 layer has a reparameterization, such as LoRA, that the packed weight would lose: leave the \
         layer's parameters out of it, or make the layer dense first"
    )]
    Adapted {
        /// The parameter.
        what: &'static str,
    },
    /// A tensor that burn could not read.
    #[error("burn could not read {what}: {reason}")]
    Read {
        /// The tensor.
        what: &'static str,
        /// What burn says.
        reason: String,
    },
}

impl From<twofour::Error> for Error {
    fn from(error: twofour::Error) -> Self {
        Error::Weight(error.into())
    }
}

impl Error {
    pub(crate) fn read<E: Display>(what: &'static str) -> impl FnOnce(E) -> Error {
        move |reason| Error::Read { what, reason: reason.to_string() }
    }
}
