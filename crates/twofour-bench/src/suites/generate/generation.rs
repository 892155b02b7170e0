//! Generation by whole models: prefill and decode by contenders, each in its own process, interleaved.
//!
//! A contender is a program. It prints an [`Introduction`] when its model is loaded. Then, for each [`Task`] that it
//! reads from stdin, it reads that many tokens in an empty context, until the first token is chosen (prefill), writes
//! that many more one by one (decode), and prints [`Times`]. Each of these is a JSON object on a line. It ends when
//! stdin does.

use serde::{Deserialize, Serialize};

/// The first line of a contender.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Introduction {
    /// Its name.
    pub(crate) contender: String,
    /// The version of a program that is not this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<String>,
    /// Bytes of the matrices that a token is multiplied with, head included.
    pub(crate) weight_bytes: u64,
}

/// What a contender is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Task {
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// Tokens to write after the first.
    pub(crate) length: usize,
}

/// How long a contender took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Times {
    /// From the first token that is read to the choice of the first that is written.
    pub(crate) prefill_s: f64,
    /// For the tokens after that.
    pub(crate) decode_s: f64,
}
