//! The output file of a benchmark's JSON.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use tempfile::NamedTempFile;

use crate::exit::Usage;

/// The JSON's destination besides stdout.
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
    /// Checks that the file can be written, before minutes of measurement.
    pub(super) fn expect_writable(&self) -> Result<()> {
        let Some(path) = self.file.as_deref() else { return Ok(()) };
        let exists = path.symlink_metadata().is_ok();
        if exists && !path.is_dir() && !self.force {
            bail!(Usage(format!("{} exists; replace it with --force", path.display())));
        }
        expect_file(path)
    }

    /// The file.
    pub(super) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Whether an existing file is to be replaced.
    pub(super) fn is_forced(&self) -> bool {
        self.force
    }

    /// Writes the file atomically.
    pub(super) fn write(&self, answer: &impl Serialize) -> Result<()> {
        let Some(path) = self.file.as_deref() else { return Ok(()) };
        let mut text = serde_json::to_vec_pretty(answer).context("writing JSON")?;
        text.push(b'\n');
        self.persist(path, &text).with_context(|| path.display().to_string())
    }

    fn persist(&self, path: &Path, text: &[u8]) -> Result<()> {
        if self.force {
            return replace(path, text);
        }
        let mut file = temporary(path)?;
        file.write_all(text)?;
        file.as_file().sync_all()?;
        file.persist_noclobber(path)?;
        Ok(())
    }
}

/// A file beside `path` that may get its name, readable as any new file is.
fn temporary(path: &Path) -> Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    Ok(builder.tempfile_in(directory(path))?)
}

/// Returns an error unless a file can be written there.
pub(super) fn expect_file(path: &Path) -> Result<()> {
    let shown = path.display();
    if path.is_dir() {
        bail!(Usage(format!("-o {shown}: is a directory; name a file")));
    }
    // Of a link either it or what it leads to would be lost.
    if path.symlink_metadata().is_ok_and(|found| !found.is_file()) {
        bail!(Usage(format!("-o {shown}: is a link, a device, a pipe or a socket, and is not replaced; name a file")));
    }
    temporary(path).with_context(|| shown.to_string())?;
    Ok(())
}

/// Replaces a file atomically: concurrent readers see the whole of the old text or of the new one, also after a kill.
pub(super) fn replace(path: &Path, text: &[u8]) -> Result<()> {
    let write = || -> Result<()> {
        let mut file = temporary(path)?;
        file.write_all(text)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| path.display().to_string())
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
