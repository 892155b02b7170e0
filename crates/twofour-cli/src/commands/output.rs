//! Shared options and progress of the commands that write a model.

use std::{ops::ControlFlow, path::PathBuf};

use clap::Args;
use twofour::file::{Overwrite, Phase, Progress};

use crate::{interrupt, present};

/// Where to write.
#[derive(Debug, Clone, Args)]
pub(crate) struct OutputOptions {
    /// Where to write: a file, or for a directory or a sharded model a directory; of a directory with one file of weights a name that ends in .safetensors is those weights alone
    #[arg(long, short, value_name = "OUT")]
    pub(crate) output: PathBuf,

    /// Replace an existing output
    #[arg(long, short)]
    force: bool,
}

impl OutputOptions {
    /// Returns whether an existing output may be replaced.
    pub(crate) fn overwrite(&self) -> Overwrite {
        if self.force { Overwrite::Yes } else { Overwrite::No }
    }
}

/// Shows the progress of a conversion; stops it after Ctrl-C.
pub(crate) fn show(bar: &mut present::progress::Progress, progress: Progress<'_>) -> ControlFlow<()> {
    tracing::debug!(tensor = progress.tensor, phase = ?progress.phase, "done");
    let done = match progress.phase {
        Phase::Checking => progress.bytes_done,
        Phase::Writing => progress.bytes_total + progress.bytes_done,
    };
    let phase = match progress.phase {
        Phase::Checking => "checking",
        Phase::Writing => "writing",
    };
    // Two passes over the same bytes.
    bar.bytes(&format!("{phase} {}", progress.tensor), done, 2 * progress.bytes_total);
    interrupt::flow()
}
