//! The bytes of one file, read when they are asked for.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    path::{Path, PathBuf},
    time::SystemTime,
};

use bytemuck::Pod;
use rayon::prelude::*;

use super::{
    Header,
    elements::{Elements, Spare},
    what_else,
};
use crate::{Error, Result, memory};

/// Bytes that one thread reads at a time.
const PIECE: usize = 4 << 20;

/// The bytes of one file, and where they came from.
#[derive(Debug)]
pub(super) struct Source {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Owned(Vec<u8>),
    Stored { file: File, stamp: Stamp, spare: Spare },
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

    /// Opens a regular file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let io = |action, source| Error::Io { path: path.to_owned(), action, source };
        // Before opening: opening a named pipe would wait for somebody to write to it.
        let metadata = fs::metadata(path).map_err(|e| io("opening", e))?;
        if !metadata.is_file() {
            let reason = if metadata.is_dir() { "is a directory, not a file" } else { "is not a regular file" };
            return Err(Error::Format { path: path.to_owned(), reason: reason.to_owned() });
        }
        let file = File::open(path).map_err(|e| io("opening", e))?;
        let stamp = Stamp::of(&file.metadata().map_err(|e| io("reading its length", e))?);
        Ok(Source { path: path.to_owned(), bytes: Bytes::Stored { file, stamp, spare: Spare::default() } })
    }

    /// The file's path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads and checks the header.
    pub(super) fn header(&self) -> Result<Header> {
        let length = match &self.bytes {
            Bytes::Owned(bytes) => bytes.len(),
            Bytes::Stored { stamp, .. } => usize::try_from(stamp.length).map_err(|_| Error::Format {
                path: self.path.clone(),
                reason: format!("{} bytes are more than this machine can address", stamp.length),
            })?,
        };
        let first = self.read::<u8>(0..length.min(8))?;
        let text = Header::text_range(&self.path, &first, length);
        let header = text.and_then(|text| Header::parse_text(&self.path, &self.read::<u8>(text)?, length));
        match (header, what_else(&self.read::<u8>(0..length.min(512))?)) {
            (Err(Error::Format { path, .. }), Some(what)) => Err(Error::Format { path, reason: format!("is {what}") }),
            (header, _) => header,
        }
    }

    /// Elements whose bytes lie in that range of the file.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::Format`] where the file was written to since it was opened.
    pub(super) fn read<T: Pod>(&self, range: Range<usize>) -> Result<Elements<'_, T>> {
        Ok(match &self.bytes {
            Bytes::Owned(bytes) => Elements::of_bytes(&bytes[range]),
            Bytes::Stored { file, spare, .. } => {
                let mut buffer = spare.take(range.len())?;
                self.fill(file, range.start, buffer.bytes_mut())?;
                Elements::of_buffer(buffer)
            }
        })
    }

    /// [`Source::read`] into a vector.
    pub(super) fn read_vec<T: Pod>(&self, range: Range<usize>) -> Result<Vec<T>> {
        Ok(match &self.bytes {
            Bytes::Owned(bytes) => bytemuck::allocation::pod_collect_to_vec(&bytes[range]),
            Bytes::Stored { file, .. } => {
                let mut elements: Vec<T> = memory::zeroed(range.len() / size_of::<T>())?;
                self.fill(file, range.start, bytemuck::cast_slice_mut(&mut elements))?;
                elements
            }
        })
    }

    /// Fills the buffer with the file's bytes from `start` on, on this thread.
    ///
    /// # Errors
    /// Those of [`Source::read`].
    pub(super) fn read_into(&self, start: usize, buffer: &mut [u8]) -> Result<()> {
        match &self.bytes {
            Bytes::Owned(bytes) => buffer.copy_from_slice(&bytes[start..][..buffer.len()]),
            Bytes::Stored { file, .. } => {
                let outcome = read_at(file, buffer, start as u64);
                self.unchanged()?;
                outcome.map_err(|source| Error::Io { path: self.path.clone(), action: "reading", source })?;
            }
        }
        Ok(())
    }

    /// Fills the buffer with the file's bytes from `start` on, by all threads.
    fn fill(&self, file: &File, start: usize, buffer: &mut [u8]) -> Result<()> {
        self.unchanged()?;
        let pieces = buffer.par_chunks_mut(PIECE).enumerate();
        let outcome = pieces.try_for_each(|(i, piece)| read_at(file, piece, (start + i * PIECE) as u64));
        // First: that it was changed explains a file that ends early.
        self.unchanged()?;
        outcome.map_err(|source| Error::Io { path: self.path.clone(), action: "reading", source })
    }

    /// An error where the file was written to since it was opened, as far as its length and its time of modification tell.
    pub(super) fn unchanged(&self) -> Result<()> {
        let Bytes::Stored { file, stamp, .. } = &self.bytes else { return Ok(()) };
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
