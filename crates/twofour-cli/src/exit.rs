//! Exit codes and error messages.

use std::{error::Error, process::ExitCode};

use anstream::eprintln;
use anyhow::Result;

use crate::{interrupt, present::style};

/// The result of a command that ran to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Exit code 0.
    Yes,
    /// Exit code 1: the command ran and the answer is no (`check` found a tensor that does not obey).
    No,
}

/// A usage error: exit code 2, as for arguments that clap rejects.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Usage(pub(crate) String);

/// Runs the command, prints an error to stderr and returns the exit code.
pub(crate) fn code(command: impl FnOnce() -> Result<Verdict>) -> ExitCode {
    match command() {
        Ok(Verdict::Yes) => ExitCode::SUCCESS,
        Ok(Verdict::No) => ExitCode::from(1),
        Err(error) if interrupt::is_cause_of(&error) => ExitCode::from(interrupt::EXIT_CODE),
        Err(error) => {
            let (red, reset) = (style::ERROR.render(), style::ERROR.render_reset());
            eprintln!("{red}error:{reset} {}", message(error.as_ref()));
            ExitCode::from(if error.is::<Usage>() { 2 } else { 1 })
        }
    }
}

/// Returns the error's message and, line by line, those of its causes that it does not already contain.
fn message(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        if !text.contains(&words) {
            text.push_str("\n  because: ");
            text.push_str(&words);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn a_cause_that_is_told_already_is_not_told_again() {
        let io = std::io::Error::other("no such thing");
        let error = twofour::Error::Io { path: "a".into(), action: "opening", source: io };
        let error = anyhow::Error::from(error).context("reading the model");
        assert_eq!(message(error.as_ref()), "reading the model\n  because: a: opening: no such thing");
    }

    #[test]
    fn the_chain_is_told_from_the_top() {
        let error = Err::<(), _>(anyhow!("third")).context("second").context("first").unwrap_err();
        assert_eq!(message(error.as_ref()), "first\n  because: second\n  because: third");
    }
}
