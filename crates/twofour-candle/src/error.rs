//! The one error type of this crate.

use candle_core::{DType, DeviceLocation};

/// Everything that can go wrong in this crate, with the place and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),

    /// The core library refused a weight, a mask or a product.
    #[error(transparent)]
    TwoFour(#[from] twofour::Error),

    /// A kernel or the driver refused an operation on a GPU.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] twofour_cuda::Error),

    /// A CUDA tensor of another stream than the operation launches on.
    #[cfg(feature = "cuda")]
    #[error("{what}: on another `CudaDevice` than the other tensors, so on another stream; make all of them on one")]
    Stream {
        /// Which tensor.
        what: &'static str,
    },

    /// An operation on slices was refused.
    #[error(transparent)]
    Operation(twofour_transformer::Error),

    /// Settings of training were refused.
    #[error(transparent)]
    Training(twofour_nn::Error),

    /// An error inside one named layer of a model.
    #[error("layer `{name}`: {source}")]
    InLayer {
        /// The layer's fully-qualified name.
        name: String,
        /// What went wrong there.
        #[source]
        source: Box<Error>,
    },

    /// A name or glob that no linear layer of the model has.
    #[error("no linear layer matches {}; nothing was \
             changed", unmatched.iter().map(ToString::to_string).collect::<Vec<_>>().join(", nor "))]
    NoSuchLayer {
        /// What was asked for, each with the names most like it.
        unmatched: Vec<Unmatched>,
    },

    /// A glob that cannot be understood.
    #[error("glob `{glob}`: {reason}")]
    Glob {
        /// The glob as given.
        glob: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A layer is in a form that does not allow what was asked.
    #[error("the layer is {found}; {remedy}")]
    WrongForm {
        /// The layer's form.
        found: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },

    /// A tensor's dtype is not one that the operation computes in.
    #[error("{what}: dtype {found:?} where {expected} is needed; convert it with `to_dtype`")]
    DType {
        /// Which tensor.
        what: &'static str,
        /// Its dtype.
        found: DType,
        /// The dtypes that would do.
        expected: String,
    },

    /// A tensor on a device where the operation does not compute.
    #[error(
        "{what}: on {found:?}, where this operation does not compute{}; move it with `to_device`",
        if cfg!(feature = "cuda") { "" } else { " (without the feature `cuda` all of twofour-candle computes on the \
                                                 CPU)" }
    )]
    Device {
        /// Which tensor.
        what: &'static str,
        /// Where it is.
        found: DeviceLocation,
    },

    /// A tensor whose shape does not fit.
    #[error("{what}: shape {found:?} where {expected} is needed")]
    Shape {
        /// Which tensor.
        what: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// What the shape must be.
        expected: String,
    },

    /// A slice of the wrong length.
    #[error("{what}: expected {expected} elements, found {found}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// The length that the dimensions ask for.
        expected: usize,
        /// The length that was given.
        found: usize,
    },

    /// The gradients hold an infinity or a NaN. Nothing was updated.
    #[error(
        "the gradient of `{parameter}` is not finite; nothing was updated: skip the step, or lower the learning rate"
    )]
    NonFiniteGradient {
        /// The first parameter whose gradient is not finite.
        parameter: String,
    },

    /// Parameters for which the backward pass left no gradient. Nothing was updated.
    #[error("no gradient arrived for {}; an operator on the way drops it, or the loss does not depend on \
             them", parameters.join(", "))]
    MissingGradient {
        /// Their names.
        parameters: Vec<String>,
    },

    /// A setting outside its range.
    #[error("{what}: {found} is not {expected}")]
    Setting {
        /// Which setting.
        what: &'static str,
        /// Its value.
        found: String,
        /// What is allowed.
        expected: &'static str,
    },

    /// Saved state that does not belong to this model.
    #[error("saved state: {reason}")]
    State {
        /// What does not fit.
        reason: String,
    },
}

/// A name or glob that matched nothing, with the names most like it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unmatched {
    /// The name or glob.
    pub name: String,
    /// Names of layers that differ in few letters, the nearest first.
    pub near: Vec<String>,
}

impl std::fmt::Display for Unmatched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}`", self.name)?;
        match self.near.as_slice() {
            [] => Ok(()),
            near => write!(f, " (did you mean `{}`?)", near.join("`, `")),
        }
    }
}

impl Error {
    /// Says in which layer the error happened.
    #[must_use]
    pub fn in_layer(self, name: impl Into<String>) -> Self {
        Error::InLayer { name: name.into(), source: Box::new(self) }
    }
}

impl From<twofour_nn::Error> for Error {
    fn from(error: twofour_nn::Error) -> Self {
        match error {
            twofour_nn::Error::Core(error) => Error::TwoFour(error),
            twofour_nn::Error::Setting { what, found, expected } => Error::Setting { what, found, expected },
            other => Error::Training(other),
        }
    }
}

impl From<twofour_transformer::Error> for Error {
    fn from(error: twofour_transformer::Error) -> Self {
        match error {
            twofour_transformer::Error::Core(error) => Error::TwoFour(error),
            twofour_transformer::Error::Setting { what, found, expected } => Error::Setting { what, found, expected },
            other => Error::Operation(other),
        }
    }
}

/// For use inside candle's traits, whose functions return candle's error.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}

/// [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
