//! The formats of files that hold tensors.

use std::{collections::BTreeMap, fmt};

use super::{FileBytes, TensorInfo, archive, gguf::Gguf, safetensors::SafeTensors};
use crate::Result;

/// A file that holds tensors, in whatever format.
///
/// A new format is an implementation and its line in the table of formats. Elements are read as they are wanted, so
/// that memory holds no more than what is asked for.
pub trait Source: fmt::Debug + Send + Sync {
    /// The file's bytes as they are stored.
    fn file(&self) -> &FileBytes;

    /// The tensors, in the order of their bytes in the file.
    fn tensors(&self) -> &[TensorInfo];

    /// The metadata that a file in safetensors of these tensors has.
    fn metadata(&self) -> &BTreeMap<String, String>;

    /// Fills the buffer with bytes of one of [`Source::tensors`], little-endian, row-major, from byte `first` of the
    /// tensor on. Both `first` and the buffer's length are whole elements, where those are whole bytes.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) where the system refuses; [`Error::Format`](crate::Error::Format) where the file
    /// changed since it was opened.
    fn read(&self, tensor: &TensorInfo, first: usize, buffer: &mut [u8]) -> Result<()>;

    /// The tensor's bytes, where they are in memory as [`Source::read`] returns them.
    fn in_memory(&self, tensor: &TensorInfo) -> Option<&[u8]>;

    /// The file that this one changes some tensors of, where it does; what it does not say itself is as there.
    fn below(&self) -> Option<&dyn Source> {
        None
    }

    /// Whether the file is safetensors, the format that conversions write.
    fn is_safetensors(&self) -> bool {
        self.below().is_some_and(Source::is_safetensors)
    }

    /// The names of the files of a model's directory that this file describes itself, such as `config.json`.
    fn described(&self) -> &'static [&'static str] {
        self.below().map_or(&[], Source::described)
    }

    /// The contents of one of the files that [`Source::described`] names; none where the file tells nothing of it.
    ///
    /// # Errors
    /// [`Error::Format`](crate::Error::Format) where it tells what cannot be written so.
    fn describe(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.below().map_or(Ok(None), |below| below.describe(name))
    }
}

/// A format: the bytes that its files begin with, and how they are opened.
type Format = (&'static [u8], fn(FileBytes) -> Result<Box<dyn Source>>);

/// The formats that have a mark; a file without one is safetensors, or an error of its header.
const FORMATS: &[Format] = &[(b"GGUF", |file| Ok(Box::new(Gguf::open(file)?))), (b"PK\x03\x04", archive::open)];

/// Opens a file in the format that its first bytes tell.
pub(super) fn open(file: FileBytes) -> Result<Box<dyn Source>> {
    let first = file.copy_of(0..file.length().min(8))?;
    match FORMATS.iter().find(|(mark, _)| first.starts_with(mark)) {
        Some((_, open)) => open(file),
        None => Ok(Box::new(SafeTensors::open(file)?)),
    }
}
