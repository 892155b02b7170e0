//! Shared options and progress of the commands that write a model.

use std::{
    collections::BTreeMap,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use anyhow::Result;
use clap::Args;
use serde::{Serialize, Serializer};
use twofour::file::{Beside, Overwrite, Phase, Progress, Reader};

use crate::{
    interrupt,
    present::{self, Screen, escape},
};

/// Where to write.
#[derive(Debug, Clone, Args)]
pub(crate) struct OutputOptions {
    /// Output path: a file for a file, a directory for a directory or a sharded model. For a directory with one file
    /// of weights, a name that ends in .safetensors writes those weights alone
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

/// A path as text of an answer: what is not UTF-8 in it as replacement characters.
pub(crate) fn path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
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

/// What a directory holds beside the model, as far as a user may have expected something else of it.
#[derive(Debug, Serialize)]
pub(crate) struct BesideAnswer {
    /// Files of weights that were copied as they are.
    copied_weights: Vec<String>,
    left_out: Vec<LeftOutAnswer>,
}

#[derive(Debug, Serialize)]
struct LeftOutAnswer {
    path: String,
    reason: &'static str,
}

impl BesideAnswer {
    /// What is beside the model of an input; nothing where the output is a single file.
    pub(crate) fn of(input: &Path, output: &Path) -> Result<Self> {
        if !output.is_dir() {
            return Ok(BesideAnswer { copied_weights: vec![], left_out: vec![] });
        }
        let beside = Beside::of(&Reader::open(input)?, output)?;
        let left_out = beside.left_out.into_iter();
        let text = |path: &PathBuf| path.display().to_string();
        let left_out = left_out.map(|left| LeftOutAnswer { path: text(&left.path), reason: left.reason }).collect();
        Ok(BesideAnswer { copied_weights: beside.weights.iter().map(text).collect(), left_out })
    }

    /// Shows it.
    pub(crate) fn tell(&self, screen: &mut Screen) -> Result<()> {
        if !self.copied_weights.is_empty() {
            let files = listed(self.copied_weights.iter());
            screen.line(format!("copied unchanged: {files}; name such a file to convert it"))?;
        }
        let mut by_reason: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
        for left in &self.left_out {
            by_reason.entry(left.reason).or_default().push(&left.path);
        }
        for (reason, paths) in by_reason {
            screen.line(format!("left out, {reason}: {}", listed(paths.into_iter())))?;
        }
        Ok(())
    }
}

/// The first paths, and how many more there are.
fn listed<'a>(paths: impl ExactSizeIterator<Item = &'a String>) -> String {
    const SHOWN: usize = 4;
    let more = paths.len().saturating_sub(SHOWN);
    let shown: Vec<String> = paths.take(SHOWN).map(|path| escape::line(path)).collect();
    let shown = shown.join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}
