//! The output directory.

use std::{
    fs,
    io::{ErrorKind, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::{Serialize, de::DeserializeOwned};

use super::{Losses, Plan, Report};

/// A directory that holds a run, or will.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
}

/// The file that makes a directory one of ours.
const PLAN: &str = "plan.json";

impl Folder {
    /// Opens a directory that is missing, empty, or holds a run.
    ///
    /// # Errors
    /// A directory with anything else in it: nothing of it is touched.
    pub(crate) fn open(path: &Path) -> Result<Folder> {
        let folder = Folder { path: path.to_owned() };
        let at = || path.display().to_string();
        match fs::read_dir(path) {
            Ok(mut entries) => {
                if !folder.file(PLAN).exists() && entries.next().is_some() {
                    bail!(
                        "{}: is not empty and holds no quickstart; nothing was changed, choose another --out",
                        path.display()
                    );
                }
            }
            Err(e) if e.kind() == ErrorKind::NotFound => fs::create_dir_all(path).with_context(at)?,
            Err(e) => return Err(e).with_context(at),
        }
        Ok(folder)
    }

    /// A file or directory in it.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The plan of the run that it holds, if it does.
    pub(crate) fn plan(&self) -> Result<Option<Plan>> {
        self.read(PLAN)
    }

    /// Makes the directory one of ours.
    pub(crate) fn write_plan(&self, plan: &Plan) -> Result<()> {
        self.write_json(PLAN, plan)
    }

    /// The losses so far.
    pub(crate) fn losses(&self) -> Result<Option<Losses>> {
        self.read("losses.json")
    }

    /// Replaces the losses.
    pub(crate) fn write_losses(&self, losses: &Losses) -> Result<()> {
        self.write_json("losses.json", losses)
    }

    /// The report of a finished run.
    pub(crate) fn report(&self) -> Result<Option<Report>> {
        self.read("report.json")
    }

    /// Writes the report: the run is finished.
    pub(crate) fn write_report(&self, report: &Report) -> Result<()> {
        self.write_json("report.json", report)
    }

    /// Writes a file: all of it or nothing.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.file(name);
        let temporary = self.file(&format!(".{name}.tmp"));
        let written = fs::File::create(&temporary)
            .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&temporary, &path));
        if written.is_err() {
            // It may not even exist.
            let _ = fs::remove_file(&temporary);
        }
        written.with_context(|| path.display().to_string())
    }

    fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(value).with_context(|| format!("writing {name}"))?;
        text.push(b'\n');
        self.write(name, &text)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let path = self.file(name);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| path.display().to_string()),
        };
        let value = serde_json::from_slice(&text).with_context(|| {
            format!("{}: not written by this version of twofour; choose another --out", path.display())
        })?;
        Ok(Some(value))
    }
}
