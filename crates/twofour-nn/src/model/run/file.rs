//! The file of a training run's checkpoint: what its tensors are called, and its checksums.

use std::{collections::BTreeMap, path::Path};

use crc32fast::Hasher;
use serde::{Deserialize, Serialize};
use twofour::{
    Mask,
    file::{Overwrite, PlannedTensor, Reader, StoredDType, StoredElement, Writer},
};

use crate::{Error, Result, cpu::masking::mask_words_of_row};

/// The name of the checkpoint's file in its directory.
pub const CHECKPOINT_FILE: &str = "checkpoint.safetensors";

pub(crate) const STATE_KEY: &str = "twofour.checkpoint";

/// The tensor of checksums.
const CHECKSUMS: &str = "checksums";

/// What the metadata of a checkpoint says.
pub(crate) fn state_of<S: for<'a> Deserialize<'a>>(reader: &Reader) -> Result<S> {
    let fault = |reason: String| Error::State { path: reader.path().to_owned(), reason };
    let Some(text) = reader.metadata().get(STATE_KEY) else {
        return Err(fault(format!("its metadata has no `{STATE_KEY}`, so it is no checkpoint")));
    };
    serde_json::from_str(text).map_err(|error| fault(format!("metadata `{STATE_KEY}`: {error}")))
}

/// A writer that keeps the checksum of each tensor.
pub(crate) struct SummingWriter {
    writer: Writer,
    /// Checksums by tensor; the empty name is the metadata's.
    sums: BTreeMap<String, u32>,
}

impl SummingWriter {
    pub(crate) fn create(
        path: &Path,
        mut planned: Vec<PlannedTensor>,
        metadata: BTreeMap<String, String>,
    ) -> Result<Self> {
        planned.push(PlannedTensor::new(CHECKSUMS, StoredDType::U32, [planned.len() + 1]));
        let sums = BTreeMap::from([(String::new(), metadata_sum(&metadata))]);
        Ok(SummingWriter { writer: Writer::create(path, Overwrite::Yes, planned, metadata)?, sums })
    }

    pub(crate) fn write<T: StoredElement>(&mut self, name: &str, elements: &[T]) -> Result<()> {
        self.sums.insert(name.to_owned(), crc32fast::hash(bytemuck::cast_slice(elements)));
        Ok(self.writer.write_elements(name, elements)?)
    }

    pub(crate) fn write_bytes(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.sums.insert(name.to_owned(), crc32fast::hash(bytes));
        Ok(self.writer.write(name, bytes)?)
    }

    pub(crate) fn finish(mut self) -> Result<()> {
        let sums: Vec<u32> = self.sums.into_values().collect();
        self.writer.write_elements(CHECKSUMS, &sums)?;
        Ok(self.writer.finish()?)
    }
}

fn metadata_sum(metadata: &BTreeMap<String, String>) -> u32 {
    let mut hasher = Hasher::new();
    metadata.iter().flat_map(|(key, value)| [key, value]).for_each(|text| hasher.update(text.as_bytes()));
    hasher.finalize()
}

/// Checks every byte of a checkpoint that has checksums.
pub(crate) fn expect_whole(reader: &Reader) -> Result<()> {
    let Ok(sums) = reader.tensor(CHECKSUMS) else { return Ok(()) };
    let fault = |reason: String| Error::State { path: reader.path().to_owned(), reason };
    let sums = sums.to_vec::<u32>()?;
    let mut names: Vec<&str> = reader.tensors().map(|tensor| tensor.name.as_str()).collect();
    names.retain(|name| *name != CHECKSUMS);
    names.sort_unstable();
    if sums.len() != names.len() + 1 {
        return Err(fault(format!("it has {} checksums for {} tensors", sums.len().saturating_sub(1), names.len())));
    }
    if metadata_sum(reader.metadata()) != sums[0] {
        return Err(fault("it is damaged: its metadata has another checksum than when it was saved".to_owned()));
    }
    for (name, sum) in names.into_iter().zip(&sums[1..]) {
        if crc32fast::hash(&reader.tensor(name)?.bytes()?) != *sum {
            let reason = format!("it is damaged: `{name}` has another checksum than when it was saved");
            return Err(fault(reason));
        }
    }
    Ok(())
}

/// A layer that is 2:4.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedLayer {
    pub(crate) name: String,
    /// The bits of the soft threshold's scale.
    pub(crate) scale: Option<u32>,
    pub(crate) seed: u64,
}

/// The mask of a layer that is 2:4.
pub(crate) fn mask_of(reader: &Reader, layer: &str, (rows, cols): (usize, usize)) -> Result<Mask> {
    let per_row = mask_words_of_row(cols);
    let words = words_of_mask::<u32>(reader, &mask_key(layer), per_row, (rows, cols))?;
    Ok(Mask::from_fn(rows, cols, |row, col| words[row * per_row + col / 32] >> (col % 32) & 1 == 1))
}

/// The mask that a method of training has for a weight in dense GEMMs: its bits, each row in whole bytes.
pub(crate) fn mask_beside(reader: &Reader, weight: &str, (rows, cols): (usize, usize)) -> Result<Mask> {
    let per_row = cols.div_ceil(8);
    let bytes = words_of_mask::<u8>(reader, &format!("{weight}.mask"), per_row, (rows, cols))?;
    Ok(Mask::from_fn(rows, cols, |row, col| bytes[row * per_row + col / 8] >> (col % 8) & 1 == 1))
}

/// What is stored of a mask for a weight of that shape.
fn words_of_mask<T: StoredElement>(
    reader: &Reader,
    key: &str,
    per_row: usize,
    (rows, cols): (usize, usize),
) -> Result<Vec<T>> {
    let view = reader.tensor(key)?;
    if view.info.shape != [rows, per_row] {
        let reason = format!("`{key}` is {:?}, for a weight [{rows}, {cols}]", view.info.shape);
        return Err(Error::State { path: reader.path().to_owned(), reason });
    }
    Ok(view.to_vec::<T>()?)
}

pub(crate) fn mask_key(layer: &str) -> String {
    format!("masks.{layer}.mask")
}

/// Whether a file is a checkpoint of training.
pub fn is_checkpoint(reader: &Reader) -> bool {
    reader.metadata().contains_key(STATE_KEY)
}
