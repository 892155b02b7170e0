//! The output file of a benchmark's JSON.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use twofour::file::{Overwrite, expect_replaceable, write_whole};
use twofour_cli::exit::Usage;

/// The JSON's destination besides stdout.
#[derive(Debug, Args)]
pub(crate) struct Output {
    /// Write the JSON to this file too
    #[arg(long = "output", short = 'o', value_name = "FILE")]
    file: Option<PathBuf>,

    /// Replace an existing FILE
    #[arg(long, short, requires = "file")]
    force: bool,
}

impl Output {
    /// Checks that the file can be written, before minutes of measurement.
    pub(crate) fn expect_writable(&self) -> Result<()> {
        let Some(path) = self.file.as_deref() else { return Ok(()) };
        expect_file(path)?;
        if path.exists() && !self.force {
            bail!(Usage(format!("{} exists; replace it with --force", path.display())));
        }
        Ok(())
    }

    /// The file.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Whether an existing file is to be replaced.
    pub(crate) fn is_forced(&self) -> bool {
        self.force
    }

    /// Writes the file atomically.
    pub(crate) fn write(&self, answer: &impl Serialize) -> Result<()> {
        let Some(path) = self.file.as_deref() else { return Ok(()) };
        let mut text = serde_json::to_vec_pretty(answer).context("writing JSON")?;
        text.push(b'\n');
        let overwrite = if self.force { Overwrite::Yes } else { Overwrite::No };
        Ok(write_whole(path, overwrite, &text)?)
    }
}

/// Returns an error unless a file can be written there.
pub(crate) fn expect_file(path: &Path) -> Result<()> {
    let shown = path.display();
    if path.is_dir() {
        bail!(Usage(format!("-o {shown}: is a directory; name a file")));
    }
    expect_replaceable(path, Overwrite::Yes).map_err(|error| Usage(format!("-o {error}")))?;
    tempfile::tempfile_in(directory(path)).with_context(|| shown.to_string())?;
    Ok(())
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
