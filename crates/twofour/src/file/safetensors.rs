//! safetensors as a source.

use std::collections::BTreeMap;

use super::{FileBytes, Header, Source, TensorInfo, what_else};
use crate::{Error, Result};

/// A file in safetensors.
#[derive(Debug)]
pub(super) struct SafeTensors {
    file: FileBytes,
    header: Header,
}

impl SafeTensors {
    /// Reads and checks the header.
    pub(super) fn open(file: FileBytes) -> Result<Self> {
        let length = file.length();
        let first = file.copy_of(0..length.min(8))?;
        let text = Header::text_range(file.path(), &first, length);
        let header = text.and_then(|text| Header::parse_text(file.path(), &file.copy_of(text)?, length));
        match (header, what_else(&file.copy_of(0..length.min(512))?)) {
            (Err(Error::Format { path, .. }), Some(what)) => Err(Error::Format { path, reason: format!("is {what}") }),
            (header, _) => Ok(SafeTensors { header: header?, file }),
        }
    }
}

impl Source for SafeTensors {
    fn file(&self) -> &FileBytes {
        &self.file
    }

    fn tensors(&self) -> &[TensorInfo] {
        self.header.tensors()
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        self.header.metadata()
    }

    fn read(&self, tensor: &TensorInfo, first: usize, buffer: &mut [u8]) -> Result<()> {
        self.file.read_into(self.header.range(tensor).start + first, buffer)
    }

    fn is_safetensors(&self) -> bool {
        true
    }

    fn in_memory(&self, tensor: &TensorInfo) -> Option<&[u8]> {
        Some(&self.file.in_memory()?[self.header.range(tensor)])
    }
}
