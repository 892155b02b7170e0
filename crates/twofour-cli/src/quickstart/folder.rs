//! The output directory.

use std::{
    ffi::OsStr,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::{Serialize, de::DeserializeOwned};
use twofour::file::{DirectoryLock, Overwrite, expect_replaceable, write_whole};
use twofour_nn::model::CHECKPOINT_FILE;

use super::{Losses, Plan, Report};
use crate::exit::Usage;

/// The output directory of a run.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    /// Held while a run uses the directory.
    _lock: DirectoryLock,
}

/// The file by which an output directory is recognized.
const PLAN: &str = "plan.json";

/// The training text, stored with the run because a later build of this program embeds another one.
const CORPUS: &str = "text";

const LOSSES: &str = "losses.json";
const REPORT: &str = "report.json";

/// What to do about a directory that cannot be used.
pub(super) const ELSEWHERE: &str = "choose another --output, or begin anew there with --force";

impl Folder {
    /// Opens a directory that is missing, empty, or holds a run.
    ///
    /// # Errors
    /// [`Usage`] for a directory with anything else in it, or a path that is not a directory; a directory that another
    /// process uses. None is changed.
    pub(crate) fn open(path: &Path) -> Result<Folder> {
        let at = || path.display().to_string();
        match fs::read_dir(path) {
            Ok(mut entries) => {
                // A process that was killed while it wrote the plan leaves only a temporary file.
                let is_own = |name: &OsStr| is_temporary(name) || DirectoryLock::is_lock(name);
                let foreign = entries.any(|entry| entry.is_ok_and(|entry| !is_own(&entry.file_name())));
                if foreign && !path.join(PLAN).exists() {
                    bail!(Usage(format!(
                        "{}: is not empty and holds no quickstart; nothing was changed, {ELSEWHERE}",
                        path.display()
                    )));
                }
            }
            Err(e) if e.kind() == ErrorKind::NotFound => fs::create_dir_all(path).with_context(at)?,
            Err(e) if e.kind() == ErrorKind::NotADirectory => {
                bail!(Usage(format!("{}: is a file, not a directory; choose another --output", path.display())))
            }
            Err(e) => return Err(e).with_context(at),
        }
        Self::locked(path)
    }

    fn locked(path: &Path) -> Result<Folder> {
        let folder = Folder { path: path.to_owned(), _lock: DirectoryLock::acquire(path)? };
        // At the end of a long run it would be late.
        folder.files().iter().try_for_each(|file| expect_replaceable(file, Overwrite::Yes))?;
        Ok(folder)
    }

    /// Opens a directory with any contents and removes the files of a run from it. Other files stay.
    pub(crate) fn begin_anew(path: &Path) -> Result<Folder> {
        fs::create_dir_all(path).with_context(|| path.display().to_string())?;
        let folder = Self::locked(path)?;
        // The plan first: without it, a half-removed run is not recognized as a run.
        for file in folder.files() {
            match fs::remove_file(&file) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(e).with_context(|| file.display().to_string()),
                _ => {}
            }
        }
        Ok(folder)
    }

    /// The files of a run that decide where the next one begins; the plan first.
    fn files(&self) -> Vec<PathBuf> {
        let checkpoints = ["dense", "sparse"].map(|model| format!("{model}/{CHECKPOINT_FILE}"));
        let names = [PLAN, REPORT, LOSSES, CORPUS].into_iter().chain(checkpoints.iter().map(String::as_str));
        names.map(|name| self.file(name)).collect()
    }

    /// The path of a file or directory in the output directory.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the plan; `None` if there is no run.
    pub(crate) fn plan(&self) -> Result<Option<Plan>> {
        self.read(PLAN)
    }

    /// Writes the plan, by which the directory is recognized.
    pub(crate) fn write_plan(&self, plan: &Plan) -> Result<()> {
        self.write_json(PLAN, plan)
    }

    /// Reads the run's text; `None` if it is missing.
    pub(crate) fn text(&self) -> Result<Option<Vec<u8>>> {
        self.bytes(CORPUS)
    }

    /// Writes the run's text.
    pub(crate) fn write_text(&self, text: &[u8]) -> Result<()> {
        self.write(CORPUS, text)
    }

    /// Reads the losses so far; `None` before the first checkpoint.
    pub(crate) fn losses(&self) -> Result<Option<Losses>> {
        self.read(LOSSES)
    }

    /// Replaces the losses.
    pub(crate) fn write_losses(&self, losses: &Losses) -> Result<()> {
        self.write_json(LOSSES, losses)
    }

    /// Reads the report; `None` before the run is finished.
    pub(crate) fn report(&self) -> Result<Option<Report>> {
        self.read(REPORT)
    }

    /// Writes the report: the run is finished.
    pub(crate) fn write_report(&self, report: &Report) -> Result<()> {
        self.write_json(REPORT, report)
    }

    /// Writes a file atomically.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        Ok(write_whole(self.file(name), Overwrite::Yes, bytes)?)
    }

    fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(value).with_context(|| format!("writing {name}"))?;
        text.push(b'\n');
        self.write(name, &text)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let Some(text) = self.bytes(name)? else { return Ok(None) };
        let value = serde_json::from_slice(&text).with_context(|| {
            let path = self.file(name);
            format!("{}: damaged, or not written by this version of twofour; {ELSEWHERE}", path.display())
        })?;
        Ok(Some(value))
    }

    fn bytes(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.file(name);
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| path.display().to_string()),
        }
    }
}

/// Whether this is the name of a file that is being written.
fn is_temporary(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.starts_with('.') && name.ends_with(".tmp")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_run_uses_a_folder_and_a_trace_of_a_killed_one_is_no_obstacle() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run");
        let first = Folder::open(&path).unwrap();
        for second in [Folder::open(&path), Folder::begin_anew(&path)] {
            let message = second.unwrap_err().to_string();
            assert!(message.contains("another process is writing there"), "{message}");
        }
        drop(first);
        fs::write(path.join(".twofour.lock"), "").unwrap();
        fs::write(path.join(".plan.json.tmp"), "half").unwrap();
        drop(Folder::open(&path).unwrap());
        fs::write(path.join("other"), "").unwrap();
        assert!(Folder::open(&path).unwrap_err().is::<Usage>());
        assert!(!path.join(".twofour.lock").exists() && path.join("other").exists());
        drop(Folder::begin_anew(&path).unwrap());
    }
}
