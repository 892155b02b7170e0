//! `twofour man`, for packagers.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};

use crate::{
    arguments::Arguments,
    exit::Verdict,
    present::{Screen, escape, shell::word},
};

/// Write the man pages, one for each command, into a directory
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct Man {
    /// The directory; made where it is missing
    directory: PathBuf,
}

impl Man {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let at = || self.directory.display().to_string();
        fs::create_dir_all(&self.directory).with_context(at)?;
        clap_mangen::generate_to(Arguments::command(), &self.directory).with_context(at)?;
        screen.line(format!("man pages written to {}", escape::path(&self.directory)))?;
        screen.next(&[format!("man -l {}", word(&self.directory.join("twofour.1")))])?;
        Ok(Verdict::Yes)
    }
}
