//! The error type of this crate.

use std::path::PathBuf;

/// Everything that can go wrong in this crate, with the place and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The core library refused a weight, a mask, a product or a file.
    #[error(transparent)]
    Core(#[from] twofour::Error),

    /// An engine refused an operation, or failed.
    #[error(transparent)]
    Operation(#[from] twofour_transformer::Error),

    /// A checkpoint directory that cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] crate::model::CheckpointError),

    /// Images or labels that cannot be used.
    #[error(transparent)]
    Idx(#[from] crate::train::IdxError),

    /// Text that cannot be read.
    #[error(transparent)]
    Text(#[from] crate::text::TextError),

    /// A file of questions that cannot be used, or a model that cannot answer them.
    #[error(transparent)]
    Questions(#[from] crate::questions::QuestionsError),

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

    /// Too many consecutive steps with a loss or gradients that are not finite.
    #[error(
        "step {step}: the loss or a gradient was NaN or infinite in {count} consecutive steps; train again with a \
         lower learning rate or a longer warm-up, into a new folder, because a run goes on only with the settings that \
         it began with"
    )]
    Diverged {
        /// The last of these steps.
        step: u64,
        /// How many there were.
        count: u64,
    },

    /// A model whose scores of tokens are NaN or infinite.
    #[error(
        "{what}: the model's scores of tokens are NaN or infinite; look for weights that are not finite, for a damaged \
         configuration, and, where it computes in f16, try bf16 or f32"
    )]
    NotFinite {
        /// What was computed from them.
        what: &'static str,
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

    /// A name or glob that no linear layer of the model has.
    #[error("no linear layer matches `{pattern}`; the model has {}", layers.join(", "))]
    NoSuchLayer {
        /// The name or glob as given.
        pattern: String,
        /// The names of the model's linear layers.
        layers: Vec<String>,
    },

    /// Settings that exclude each other.
    #[error("{first} and {second} exclude each other: {reason}")]
    Conflict {
        /// One of them.
        first: String,
        /// The other.
        second: String,
        /// The reason.
        reason: &'static str,
    },

    /// One of several trainers of the same model has failed.
    #[error("rank {rank} failed, and the others stopped: {reason}")]
    Rank {
        /// Which one, from 0, in the order of the devices.
        rank: usize,
        /// Its error.
        reason: String,
    },

    /// Trainers of the same model that no longer have the same weights.
    #[error(
        "after {step} steps {what} differs between ranks {} and {}; go on from the last checkpoint; if it happens \
         again, one of the devices computes wrongly, or they are of different kinds",
        ranks[0], ranks[1]
    )]
    RanksDiffer {
        /// What differs.
        what: String,
        /// Steps done.
        step: u64,
        /// Two ranks between which it does.
        ranks: [usize; 2],
    },

    /// A checkpoint that another run saved.
    #[error("{}: it was saved with other {what}; use another folder for this run", path.display())]
    OtherRun {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        what: &'static str,
    },

    /// Saved state that is damaged or cannot be written.
    #[error("saved state in {}: {reason}", path.display())]
    State {
        /// The checkpoint.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
}

impl Error {
    /// A buffer or slice of the wrong length.
    pub(crate) fn length(what: &'static str, expected: usize, found: usize) -> Self {
        twofour_transformer::Error::Length { what, expected, found }.into()
    }

    /// A token that is not in the vocabulary.
    pub(crate) fn token(what: &'static str, token: u32, position: usize, vocabulary: usize) -> Self {
        twofour_transformer::Error::Token { what, token, position, vocabulary }.into()
    }

    /// Says in which layer the error happened.
    #[must_use]
    pub fn in_layer(self, name: impl Into<String>) -> Self {
        Error::InLayer { name: name.into(), source: Box::new(self) }
    }
}

/// [`std::result::Result`] with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
