//! How a command ends: its verdict, and errors in how it was called.

use std::fmt;

use twofour_nn::recipe::Mistakes;

use crate::present::units;

/// The result of a command that ran to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Exit code 0.
    Yes,
    /// Exit code 1: the command ran and the answer is no (`check` found a tensor that violates the pattern).
    No,
}

/// A usage error: exit code 2, as for arguments that clap rejects.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// A usage error with a line for each of its reasons.
#[derive(Debug, thiserror::Error)]
#[error("{heading}")]
pub struct UsageList {
    /// What is wrong.
    pub heading: String,
    /// The reasons.
    pub items: Vec<String>,
}

impl UsageList {
    /// The mistakes of a recipe; `what` says whose they are.
    pub(crate) fn of_mistakes(what: impl fmt::Display, mistakes: &Mistakes) -> Self {
        UsageList {
            heading: format!("{what}: {}", units::plural(mistakes.len(), "mistake")),
            items: mistakes.iter().map(ToString::to_string).collect(),
        }
    }
}
