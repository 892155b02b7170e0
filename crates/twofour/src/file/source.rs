//! The bytes of one file, mapped into memory.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    time::SystemTime,
};

use memmap2::Mmap;

use crate::{Error, Result};

/// The bytes of one file, and where they came from.
#[derive(Debug)]
pub(super) struct Source {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Owned(Vec<u8>),
    Mapped { map: Mmap, file: File, stamp: Stamp },
}

/// What changes when somebody writes to a file.
#[derive(Debug, PartialEq)]
struct Stamp {
    length: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        Stamp { length: metadata.len(), modified: metadata.modified().ok() }
    }
}

impl Source {
    /// Bytes that are in memory already; the path is only named in errors.
    pub(super) fn owned(path: &Path, bytes: Vec<u8>) -> Self {
        Source { path: path.to_owned(), bytes: Bytes::Owned(bytes) }
    }

    /// Maps a regular file.
    pub(super) fn map(path: &Path) -> Result<Self> {
        let io = |action, source| Error::Io { path: path.to_owned(), action, source };
        // Before opening: opening a named pipe would wait for somebody to write to it.
        let metadata = fs::metadata(path).map_err(|e| io("opening", e))?;
        if !metadata.is_file() {
            let reason = if metadata.is_dir() { "is a directory, not a file" } else { "is not a regular file" };
            return Err(Error::Format { path: path.to_owned(), reason: reason.to_owned() });
        }
        let file = File::open(path).map_err(|e| io("opening", e))?;
        let stamp = Stamp::of(&file.metadata().map_err(|e| io("reading its length", e))?);
        // SAFETY: the map is only read. Another process that writes to the file meanwhile would change bytes under a
        // shared slice; no program can rule that out for a file it does not own, every reader of mapped weights lives
        // with it, and `unchanged` turns what can be noticed into an error. Elements are plain old data, so changed bytes
        // are wrong values, never invalid ones.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| io("mapping into memory", e))?;
        Ok(Source { path: path.to_owned(), bytes: Bytes::Mapped { map, file, stamp } })
    }

    /// The file's path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// All bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Owned(bytes) => bytes,
            Bytes::Mapped { map, .. } => map,
        }
    }

    /// An error where the file was written to since it was mapped. Reading past the end of a file that became shorter
    /// would kill the process, so this is asked before every tensor.
    pub(super) fn unchanged(&self) -> Result<()> {
        let Bytes::Mapped { file, stamp, .. } = &self.bytes else { return Ok(()) };
        let now = file.metadata().map_err(|source| Error::Io {
            path: self.path.clone(),
            action: "reading its length",
            source,
        })?;
        if Stamp::of(&now) == *stamp {
            Ok(())
        } else {
            Err(Error::Format {
                path: self.path.clone(),
                reason: "the file was changed while it was being read; start again when nothing writes to it"
                    .to_owned(),
            })
        }
    }
}
