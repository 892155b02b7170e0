//! Files of an output directory that wait for their names.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use super::super::{
    Overwrite,
    writer::{expect_replaceable, sync_directory},
};
use crate::{Error, Result};

/// The directory of waiting files, in the output directory. One that is there while nobody holds the output's lock was
/// left by a process that was killed.
const NAME: &str = ".twofour-staging.tmp";

/// Bytes that are copied between two looks at whether to go on.
const PIECE: u64 = 64 << 20;

/// Files and directories that are complete and on the disk, and do not have their names yet; dropping it removes them.
#[derive(Debug)]
pub(super) struct Staging {
    output: PathBuf,
    path: PathBuf,
    overwrite: Overwrite,
    /// Paths in the output's directory, each directory before what it holds.
    directories: Vec<PathBuf>,
    files: Vec<PathBuf>,
}

impl Staging {
    /// Nothing yet, for an output directory that is locked.
    pub(super) fn begin(output: &Path, overwrite: Overwrite) -> Result<Self> {
        let path = output.join(NAME);
        let failed = |action| {
            let path = path.clone();
            move |source| Error::Io { path, action, source }
        };
        if path.exists() {
            fs::remove_dir_all(&path).map_err(failed("removing what a killed process left"))?;
        }
        fs::create_dir(&path).map_err(failed("making a temporary directory"))?;
        let (output, directories, files) = (output.to_owned(), Vec::new(), Vec::new());
        Ok(Staging { output, path, overwrite, directories, files })
    }

    /// Whether an entry of an output directory is that of waiting files.
    pub(super) fn is_staging(name: &std::ffi::OsStr) -> bool {
        name == NAME
    }

    /// Adds a directory.
    pub(super) fn directory(&mut self, relative: PathBuf) -> Result<()> {
        let path = self.path.join(&relative);
        fs::create_dir(&path).map_err(|source| Error::Io { path, action: "making the directory", source })?;
        self.directories.push(relative);
        Ok(())
    }

    /// Adds a file with these bytes.
    pub(super) fn write(&mut self, relative: PathBuf, bytes: &[u8]) -> Result<()> {
        let mut file = self.create(&relative)?;
        file.write_all(bytes).map_err(self.failed(&relative, "writing"))?;
        self.keep(&file, relative)
    }

    /// Adds a copy of a file; `watch` is asked now and then whether to go on.
    pub(super) fn copy(
        &mut self,
        from: &Path,
        relative: PathBuf,
        watch: &mut dyn FnMut(&Path) -> Result<()>,
    ) -> Result<()> {
        let reading = |source| Error::Io { path: from.to_owned(), action: "reading it", source };
        let source = File::open(from).map_err(reading)?;
        let mut file = self.create(&relative)?;
        loop {
            watch(&relative)?;
            let copied =
                io::copy(&mut (&source).take(PIECE), &mut file).map_err(self.failed(&relative, "writing a copy"))?;
            if copied < PIECE {
                return self.keep(&file, relative);
            }
        }
    }

    fn create(&self, relative: &Path) -> Result<File> {
        expect_replaceable(&self.output.join(relative), self.overwrite)?;
        File::create(self.path.join(relative)).map_err(self.failed(relative, "making a temporary file for it"))
    }

    fn keep(&mut self, file: &File, relative: PathBuf) -> Result<()> {
        file.sync_all().map_err(self.failed(&relative, "bringing it to the disk"))?;
        self.files.push(relative);
        Ok(())
    }

    fn failed(&self, relative: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Error + use<> {
        let path = self.output.join(relative);
        move |source| Error::Io { path, action, source }
    }

    /// The paths in the output's directory, each directory before what it holds.
    pub(super) fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.directories.iter().chain(&self.files)
    }

    /// Gives every file its name.
    pub(super) fn publish(&mut self) -> Result<()> {
        for relative in &self.directories {
            let path = self.output.join(relative);
            if !path.is_dir() {
                fs::create_dir(&path).map_err(self.failed(relative, "making the directory"))?;
            }
        }
        for relative in &self.files {
            let path = self.output.join(relative);
            expect_replaceable(&path, self.overwrite)?;
            fs::rename(self.path.join(relative), &path).map_err(self.failed(relative, "giving it its name"))?;
        }
        self.directories.iter().try_for_each(|relative| sync_directory(&self.output.join(relative)))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Best effort: the next output in this directory removes it.
        let _ = fs::remove_dir_all(&self.path);
    }
}
