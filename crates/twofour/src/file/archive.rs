//! ZIP archives: what `torch.save` and numpy's `savez` write.

use std::{
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
};

use flate2::read::DeflateDecoder;
use zip::{CompressionMethod, ZipArchive};

use super::{FileBytes, npz::Npz, pytorch::PyTorch, source::Source, unique::quoted};
use crate::{Error, Result};

/// The most bytes that one byte of a deflated entry stands for.
const MAX_RATIO: usize = 1032;

/// An entry of an archive.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) name: String,
    /// Where its bytes lie in the file.
    pub(super) range: Range<usize>,
    /// Whether they are compressed.
    pub(super) is_deflated: bool,
    /// Its length, not compressed.
    pub(super) length: usize,
}

/// Opens an archive in the format that its entries tell.
pub(super) fn open(file: FileBytes) -> Result<Box<dyn Source>> {
    let entries = entries(&file).map_err(|reason| Error::Format { path: file.path().to_owned(), reason })?;
    match entries.iter().any(|entry| entry.name.ends_with(".npy")) {
        true => Ok(Box::new(Npz::open(file, entries)?)),
        false => Ok(Box::new(PyTorch::open(file, entries)?)),
    }
}

/// The entries of an archive, in its order.
fn entries(file: &FileBytes) -> Result<Vec<Entry>, String> {
    let wrong = |error: zip::result::ZipError| {
        format!("is an archive of torch.save or numpy that is truncated or damaged: {error}")
    };
    let mut archive = ZipArchive::new(Position { file, at: 0 }).map_err(wrong)?;
    let mut entries = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index_raw(index).map_err(wrong)?;
        let name = entry.name().map_err(wrong)?.into_owned();
        let is_deflated = match entry.compression() {
            CompressionMethod::Stored => false,
            CompressionMethod::DEFLATE => true,
            other => return Err(format!("entry {} of the archive is compressed by {other}", quoted(&name))),
        };
        if entry.encrypted() {
            return Err(format!("entry {} of the archive is encrypted", quoted(&name)));
        }
        let start = entry.data_start().and_then(|start| usize::try_from(start).ok());
        let size = |size: u64| usize::try_from(size).ok();
        let end = start.zip(size(entry.compressed_size())).and_then(|(start, size)| start.checked_add(size));
        let (Some(start), Some(end), Some(length)) =
            (start, end.filter(|end| *end <= file.length()), size(entry.size()))
        else {
            return Err(format!("entry {} of the archive lies outside of the file", quoted(&name)));
        };
        let longest = if is_deflated { (end - start).saturating_mul(MAX_RATIO) } else { end - start };
        if length > longest || (!is_deflated && length != longest) {
            return Err(format!("entry {} of the archive claims {length} bytes, which it has not", quoted(&name)));
        }
        entries.push(Entry { name, range: start..end, is_deflated, length });
    }
    Ok(entries)
}

impl Entry {
    /// Fills the buffer with the first bytes of the entry, not compressed.
    pub(super) fn read(&self, file: &FileBytes, buffer: &mut [u8]) -> io::Result<()> {
        let mut stored = Position { file, at: self.range.start as u64 }.take(self.range.len() as u64);
        if self.is_deflated { DeflateDecoder::new(stored).read_exact(buffer) } else { stored.read_exact(buffer) }
    }
}

/// A place in a file from which it is read on.
struct Position<'a> {
    file: &'a FileBytes,
    at: u64,
}

impl Read for Position<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let start = usize::try_from(self.at).unwrap_or(usize::MAX).min(self.file.length());
        let count = buffer.len().min(self.file.length() - start);
        self.file.read_into(start, &mut buffer[..count]).map_err(io::Error::other)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Seek for Position<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (from, offset) = match to {
            SeekFrom::Start(at) => {
                self.at = at;
                return Ok(at);
            }
            SeekFrom::End(offset) => (self.file.length() as u64, offset),
            SeekFrom::Current(offset) => (self.at, offset),
        };
        let at = from.checked_add_signed(offset);
        self.at = at.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a place before the file"))?;
        Ok(self.at)
    }
}
