//! Running the built program.

#![allow(unreachable_pub)]

#[path = "../../../twofour-cli/tests/support/ran.rs"]
mod ran;

use std::{path::Path, process::Command};

pub use ran::{Ran, names};

/// The program, with a plain environment.
pub fn bench() -> Command {
    ran::plain(env!("CARGO_BIN_EXE_twofour-bench"))
}

/// Runs the program in a directory.
pub fn run(directory: &Path, arguments: &[&str]) -> Ran {
    bench().args(arguments).current_dir(directory).output().unwrap().into()
}
