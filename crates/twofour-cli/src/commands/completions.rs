//! `twofour completions`.

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::Shell;

use crate::{exit::Verdict, present::Screen};

/// Print a shell's completions
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour completions bash > ~/.local/share/bash-completion/completions/twofour
  twofour completions zsh > ~/.zfunc/_twofour
  twofour completions fish > ~/.config/fish/completions/twofour.fish")]
pub(crate) struct Completions {
    /// The shell
    shell: Shell,
}

impl Completions {
    /// Runs the command; `program` is the whole command line.
    pub(crate) fn run(self, mut program: Command, screen: &mut Screen) -> Result<Verdict> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut program, "twofour", &mut script);
        screen.raw(&script)?;
        Ok(Verdict::Yes)
    }
}
