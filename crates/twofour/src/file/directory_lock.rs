//! The directory that one process writes an output to.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, ErrorKind, Read, Seek, SeekFrom, Write},
    path::{Component, Path, PathBuf},
};

use super::{Overwrite, writer::expect_replaceable};
use crate::{Error, Result};

/// The file that a process holds locked while it writes to a directory.
const NAME: &str = ".twofour.lock";

/// Keeps other processes from writing to a directory, for as long as it lives.
///
/// The lock is a file in the directory. The system releases it when the process dies, however it dies; the file then
/// stays behind and tells the next process which files were about to get their names.
#[derive(Debug)]
pub struct DirectoryLock {
    file: File,
    directory: PathBuf,
    path: PathBuf,
    /// Files and folders that have their names only in part, as paths in the directory.
    announced: Vec<PathBuf>,
}

impl DirectoryLock {
    /// Locks a directory, and removes the files that a killed process had listed as unfinished.
    ///
    /// # Errors
    /// [`Error::Busy`] where another process holds the lock; [`Error::Format`] where a link or a device has its name;
    /// [`Error::Io`] where the system refuses.
    pub fn acquire(directory: &Path) -> Result<Self> {
        let path = directory.join(NAME);
        let io = |action| {
            let path = path.clone();
            move |source| Error::Io { path, action, source }
        };
        loop {
            expect_replaceable(&path, Overwrite::Yes)?;
            let opened = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
            let file = opened.map_err(io("making it, which keeps other processes from writing there"))?;
            match file.try_lock() {
                // Without locks on this file system there are none for others, either.
                Ok(()) | Err(TryLockError::Error(_)) => {}
                Err(TryLockError::WouldBlock) => return Err(Error::Busy { path: directory.to_owned() }),
            }
            // The process that held it may have removed the file between the two steps.
            if is_at(&file, &path) {
                let (directory, announced) = (directory.to_owned(), Vec::new());
                let mut lock = DirectoryLock { file, directory, path: path.clone(), announced };
                lock.remove_left().map_err(io("removing what a killed process left"))?;
                return Ok(lock);
            }
        }
    }

    /// Whether an entry of a directory is the lock.
    pub fn is_lock(name: &std::ffi::OsStr) -> bool {
        name == NAME
    }

    /// Lists the files and folders of the directory that are about to get their names, as paths in it. They are removed
    /// unless all of them get there: when this is dropped before [`DirectoryLock::complete`], or, if the process is
    /// killed, by the next one.
    pub(super) fn announce(&mut self, paths: Vec<PathBuf>) -> Result<()> {
        let text: Vec<&str> = paths.iter().filter_map(|path| path.to_str()).collect();
        let text = serde_json::json!(text).to_string();
        let io = |source| Error::Io { path: self.path.clone(), action: "writing", source };
        write(&mut self.file, text.as_bytes()).map_err(io)?;
        self.announced = paths;
        Ok(())
    }

    /// All that was announced has its name.
    pub(super) fn complete(&mut self) {
        self.announced.clear();
    }

    fn remove_left(&mut self) -> io::Result<()> {
        let mut text = Vec::new();
        self.file.read_to_end(&mut text)?;
        // A list that was cut short announces nothing: no file had its name yet.
        self.announced = serde_json::from_slice(&text).unwrap_or_default();
        self.remove_announced()?;
        write(&mut self.file, b"")
    }

    fn remove_announced(&mut self) -> io::Result<()> {
        for path in self.announced.drain(..).rev().filter(|path| is_inside(path)) {
            let path = self.directory.join(path);
            match fs::symlink_metadata(&path) {
                // A folder that holds anything else stays.
                Ok(found) if found.is_dir() => _ = fs::remove_dir(&path),
                Ok(_) => fs::remove_file(&path)?,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Best effort: what stays is found by the next process, in a lock file that is not locked.
        if self.remove_announced().is_ok() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn write(file: &mut File, bytes: &[u8]) -> io::Result<()> {
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Whether a path leads to something in the directory that it is relative to.
fn is_inside(path: &Path) -> bool {
    path.components().next().is_some() && path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// Whether an open file is the one of that path.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

/// Whether an open file is the one of that path: an open file cannot be removed there.
#[cfg(not(unix))]
fn is_at(_: &File, path: &Path) -> bool {
    path.exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn one_holds_it_and_nothing_stays() {
        let directory = tempfile::tempdir().unwrap();
        let lock = DirectoryLock::acquire(directory.path()).unwrap();
        assert!(matches!(DirectoryLock::acquire(directory.path()), Err(Error::Busy { .. })));
        drop(lock);
        drop(DirectoryLock::acquire(directory.path()).unwrap());
        assert!(entries(directory.path()).is_empty());
        assert!(DirectoryLock::acquire(&directory.path().join("absent")).is_err());
    }

    #[test]
    fn what_a_killed_process_announced_is_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let outside = at("outside");
        fs::write(&outside, "").unwrap();
        let inside = at("out");
        for folder in ["out", "out/empty", "out/full"] {
            fs::create_dir(at(folder)).unwrap();
        }
        for file in ["out/a", "out/own", "out/full/b", "out/full/own"] {
            fs::write(at(file), "").unwrap();
        }
        let mut lock = DirectoryLock::acquire(&inside).unwrap();
        let announced = ["empty", "full", "full/b", "a", "never", "../outside", "/etc/passwd", ""].map(PathBuf::from);
        lock.announce(announced.into()).unwrap();
        // As a kill leaves it.
        let text = fs::read(inside.join(NAME)).unwrap();
        lock.complete();
        drop(lock);
        fs::write(inside.join(NAME), text).unwrap();
        drop(DirectoryLock::acquire(&inside).unwrap());
        assert_eq!(
            (entries(&inside), entries(&inside.join("full"))),
            (vec!["full".into(), "own".into()], vec!["own".into()])
        );
        assert!(outside.exists());
    }
}
