//! The error type of this crate.

use crate::engine::Kind;

/// Everything that can go wrong in this crate, with the place and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The core library refused a weight, a mask or a product.
    #[error(transparent)]
    Core(#[from] twofour::Error),

    /// A kernel or the driver refused an operation on a GPU.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] twofour_cuda::Error),

    /// An error inside one named layer of a model.
    #[error("layer `{name}`: {source}")]
    InLayer {
        /// The layer's fully-qualified name.
        name: String,
        /// What went wrong there.
        #[source]
        source: Box<Error>,
    },

    /// A buffer or slice of the wrong length.
    #[error("{what}: expected {expected} elements, found {found}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// The length that the dimensions require.
        expected: usize,
        /// Its length.
        found: usize,
    },

    /// A new mask for a weight that is rounded to integers, whose scales belong to the old one.
    #[error("a weight that is rounded to integers keeps its mask: round it anew under another")]
    RoundedMask,

    /// A buffer of the wrong kind.
    #[error("{what}: a {found:?} buffer where {expected:?} is required")]
    Kind {
        /// Which buffer.
        what: &'static str,
        /// The kind that the operation requires.
        expected: Kind,
        /// Its kind.
        found: Kind,
    },

    /// A token that is not in the vocabulary.
    #[error("{what}: token {token} at position {position}, but the vocabulary has {vocabulary} tokens")]
    Token {
        /// Inputs or targets.
        what: &'static str,
        /// The token.
        token: u32,
        /// Its index in the batch.
        position: usize,
        /// Number of tokens.
        vocabulary: usize,
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

    /// An operation that an engine does not have.
    #[error("the {engine} engine does not support {what}; {remedy}")]
    Unsupported {
        /// The engine.
        engine: &'static str,
        /// The operation.
        what: String,
        /// What to do instead.
        remedy: &'static str,
    },
}

impl Error {
    /// Returns the error as one inside a named layer.
    #[must_use]
    pub fn in_layer(self, name: impl Into<String>) -> Self {
        Error::InLayer { name: name.into(), source: Box::new(self) }
    }

    /// Returns whether an operation was refused because a number is NaN or infinite.
    pub fn is_not_finite(&self) -> bool {
        match self {
            Error::Core(twofour::Error::NotANumber { .. } | twofour::Error::Infinite { .. }) => true,
            Error::InLayer { source, .. } => source.is_not_finite(),
            _ => false,
        }
    }
}

/// [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
