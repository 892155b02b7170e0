//! The archive that `torch.save` writes: a ZIP file whose entries are not compressed.

use std::{
    collections::HashMap,
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
};

use zip::{CompressionMethod, ZipArchive};

use super::super::{FileBytes, unique::quoted};

/// Where each entry's bytes lie in the file, by its name below the archive's one folder.
#[derive(Debug)]
pub(super) struct Archive {
    entries: HashMap<String, Range<usize>>,
}

impl Archive {
    /// Reads the archive's directory.
    ///
    /// # Errors
    /// What is wrong, and with which entry.
    pub(super) fn open(file: &FileBytes) -> Result<Self, String> {
        let wrong =
            |error: zip::result::ZipError| format!("is an archive of torch.save that is truncated or damaged: {error}");
        let mut archive = ZipArchive::new(Position { file, at: 0 }).map_err(wrong)?;
        let mut entries = HashMap::new();
        for index in 0..archive.len() {
            let entry = archive.by_index_raw(index).map_err(wrong)?;
            let name = entry.name().map_err(wrong)?.into_owned();
            if entry.encrypted() || entry.compression() != CompressionMethod::Stored {
                return Err(format!("entry {} of the archive is compressed, as torch.save writes none", quoted(&name)));
            }
            let start = entry.data_start().and_then(|start| usize::try_from(start).ok());
            let end = start.zip(usize::try_from(entry.size()).ok()).and_then(|(start, size)| start.checked_add(size));
            let (Some(start), Some(end)) = (start, end.filter(|end| *end <= file.length())) else {
                return Err(format!("entry {} of the archive lies outside of the file", quoted(&name)));
            };
            let inside = name.split_once('/').map_or(name.as_str(), |(_, inside)| inside).to_owned();
            if entries.insert(inside, start..end).is_some() {
                return Err(format!("the archive has two entries {}", quoted(&name)));
            }
        }
        Ok(Archive { entries })
    }

    /// Where an entry's bytes lie.
    pub(super) fn get(&self, name: &str) -> Option<Range<usize>> {
        self.entries.get(name).cloned()
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
