//! The bytes of one file, read when they are asked for.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::{Error, Result, memory};

/// The bytes of one file, and where they came from.
#[derive(Debug)]
pub struct FileBytes {
    path: PathBuf,
    length: usize,
    contents: Contents,
}

#[derive(Debug)]
enum Contents {
    Owned(Vec<u8>),
    Stored { file: File, stamp: Stamp },
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

impl FileBytes {
    /// Bytes that are in memory already; the path is only named in errors.
    pub(super) fn owned(path: &Path, bytes: Vec<u8>) -> Self {
        FileBytes { path: path.to_owned(), length: bytes.len(), contents: Contents::Owned(bytes) }
    }

    /// Opens a regular file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let io = |action, source| Error::Io { path: path.to_owned(), action, source };
        let fault = |reason: String| Error::Format { path: path.to_owned(), reason };
        // Before opening: opening a named pipe would wait for somebody to write to it.
        let metadata = fs::metadata(path).map_err(|e| io("opening", e))?;
        if !metadata.is_file() {
            let reason = if metadata.is_dir() { "is a directory, not a file" } else { "is not a regular file" };
            return Err(fault(reason.to_owned()));
        }
        let file = File::open(path).map_err(|e| io("opening", e))?;
        let stamp = Stamp::of(&file.metadata().map_err(|e| io("reading its length", e))?);
        let length = usize::try_from(stamp.length)
            .map_err(|_| fault(format!("{} bytes are more than this machine can address", stamp.length)))?;
        Ok(FileBytes { path: path.to_owned(), length, contents: Contents::Stored { file, stamp } })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length in bytes, when it was opened.
    pub fn length(&self) -> usize {
        self.length
    }

    /// All of the bytes, where they are in memory.
    pub fn in_memory(&self) -> Option<&[u8]> {
        match &self.contents {
            Contents::Owned(bytes) => Some(bytes),
            Contents::Stored { .. } => None,
        }
    }

    /// A copy of the bytes of that range, which must lie inside the file.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::Format`] where the file was written to since it was opened.
    pub fn copy_of(&self, range: Range<usize>) -> Result<Vec<u8>> {
        let mut bytes = memory::zeroed(range.len())?;
        self.read_into(range.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Fills the buffer with the bytes from `start` on, which must lie inside the file.
    ///
    /// # Errors
    /// Those of [`FileBytes::copy_of`].
    pub fn read_into(&self, start: usize, buffer: &mut [u8]) -> Result<()> {
        match &self.contents {
            Contents::Owned(bytes) => buffer.copy_from_slice(&bytes[start..][..buffer.len()]),
            Contents::Stored { file, .. } => {
                let outcome = read_at(file, buffer, start as u64);
                // First: that it was changed explains a file that ends early.
                self.expect_unchanged()?;
                outcome.map_err(|source| Error::Io { path: self.path.clone(), action: "reading", source })?;
            }
        }
        Ok(())
    }

    /// Checks that the file was not written to since it was opened, as far as its length and its time of modification
    /// tell.
    ///
    /// # Errors
    /// [`Error::Format`] where it was.
    pub fn expect_unchanged(&self) -> Result<()> {
        let Contents::Stored { file, stamp } = &self.contents else { return Ok(()) };
        let now = file.metadata().map_err(|source| Error::Io {
            path: self.path.clone(),
            action: "reading its length",
            source,
        })?;
        if Stamp::of(&now) == *stamp {
            return Ok(());
        }
        let reason = "the file was changed while it was being read; start again when nothing writes to it";
        Err(Error::Format { path: self.path.clone(), reason: reason.to_owned() })
    }
}

/// Fills the buffer with the file's bytes from `offset` on.
#[cfg(unix)]
fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, offset)
}

/// Fills the buffer with the file's bytes from `offset` on.
#[cfg(windows)]
fn read_at(file: &File, mut buffer: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, buffer, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                buffer = &mut buffer[read..];
                offset += read as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
