//! `twofour man`, for packagers.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use clap::{Args, Command};
use twofour::file::{Overwrite, write_whole};

use crate::{
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
    /// Runs the command; `program` is the whole command line.
    pub(crate) fn run(self, program: Command, screen: &mut Screen) -> Result<Verdict> {
        let at = || self.directory.display().to_string();
        fs::create_dir_all(&self.directory).with_context(at)?;
        let mut command = program.disable_help_subcommand(true);
        command.build();
        self.write(command)?;
        screen.line(format!("man pages written to {}", escape::path(&self.directory)))?;
        screen.next(&[format!("man -l {}", word(&self.directory.join("twofour.1")))])?;
        Ok(Verdict::Yes)
    }

    /// Writes the pages of a command and of those below it.
    fn write(&self, command: Command) -> Result<()> {
        let shown = command.get_subcommands().filter(|command| !command.is_hide_set());
        shown.cloned().try_for_each(|command| self.write(command))?;
        let (page, mut text) = (clap_mangen::Man::new(command), Vec::new());
        page.render(&mut text)?;
        Ok(write_whole(self.directory.join(page.get_filename()), Overwrite::Yes, &text)?)
    }
}
