//! The file that a benchmark's JSON goes to.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use tempfile::NamedTempFile;

use crate::exit::Usage;

/// Where the JSON goes besides stdout.
#[derive(Debug, Args)]
pub(super) struct Output {
    /// Write the JSON to this file too
    #[arg(long = "output", short = 'o', value_name = "FILE")]
    file: Option<PathBuf>,

    /// Replace an existing FILE
    #[arg(long, short, requires = "file")]
    force: bool,
}

impl Output {
    /// Minutes of measuring shall not end at a file that cannot be written.
    pub(super) fn expect_writable(&self) -> Result<()> {
        let Some(path) = self.file.as_deref() else { return Ok(()) };
        let shown = path.display();
        if path.is_dir() {
            bail!(Usage(format!("-o {shown}: is a directory; name a file")));
        }
        if path.exists() && !self.force {
            bail!(Usage(format!("{shown} exists; replace it with --force")));
        }
        NamedTempFile::new_in(directory(path)).with_context(|| shown.to_string())?;
        Ok(())
    }

    /// Writes all of the file or nothing.
    pub(super) fn write(&self, answer: &impl Serialize) -> Result<()> {
        let Some(path) = self.file.as_deref() else { return Ok(()) };
        let mut text = serde_json::to_vec_pretty(answer).context("writing JSON")?;
        text.push(b'\n');
        self.persist(path, &text).with_context(|| path.display().to_string())
    }

    fn persist(&self, path: &Path, text: &[u8]) -> Result<()> {
        let mut file = NamedTempFile::new_in(directory(path))?;
        file.write_all(text)?;
        file.as_file().sync_all()?;
        if self.force {
            file.persist(path)?;
        } else {
            file.persist_noclobber(path)?;
        }
        Ok(())
    }
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
