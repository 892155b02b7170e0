//! Masks and levels in a file.
//!
//! A parameter `w` becomes a tensor `w.mask` of U8, `[rows, ceil(cols / 8)]`: bit `b` of byte `j` of a row stands for
//! column `8 j + b`, 1 where the element is kept. The metadata's entry `twofour.sparsifier` holds version, columns and
//! levels as JSON.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use serde::{Deserialize, Serialize};

use super::Sparsifier;
use crate::{
    Error, Mask, Result,
    file::{Overwrite, PlannedTensor, Reader, StoredDType, Writer},
};

const KEY: &str = "twofour.sparsifier";
const VERSION: u64 = 1;
const SUFFIX: &str = ".mask";

#[derive(Debug, Serialize, Deserialize)]
struct State {
    version: u64,
    parameters: BTreeMap<String, ParameterState>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ParameterState {
    cols: usize,
    base_level: f64,
    level: f64,
}

impl Sparsifier {
    /// The masks as tensors of a checkpoint, `<name>.mask`, in the order of names, with their bytes.
    pub fn tensors(&self) -> impl Iterator<Item = (PlannedTensor, Vec<u8>)> {
        self.parameters.iter().map(|(name, parameter)| {
            let mask = &parameter.mask;
            let shape = [mask.rows(), mask.cols().div_ceil(8)];
            let row = |row: usize| mask.row_words(row).iter().flat_map(|word| word.to_le_bytes()).take(shape[1]);
            let bytes = (0..mask.rows()).flat_map(row).collect();
            (PlannedTensor::new(format!("{name}{SUFFIX}"), StoredDType::U8, shape), bytes)
        })
    }

    /// The metadata entry of a checkpoint that holds [`Sparsifier::tensors`]: its key and value.
    pub fn metadata(&self) -> (String, String) {
        let of = |(name, p): (&String, &super::sparsifier::Parameter)| {
            let state = ParameterState { cols: p.mask.cols(), base_level: p.base_level, level: p.level };
            (name.clone(), state)
        };
        let state = State { version: VERSION, parameters: self.parameters.iter().map(of).collect() };
        // Numbers that are finite and strings always become JSON.
        (KEY.to_owned(), serde_json::to_string(&state).unwrap_or_default())
    }

    /// Writes masks and levels to a safetensors file of their own.
    ///
    /// # Errors
    /// Those of [`Writer::create`].
    pub fn save(&self, path: impl AsRef<Path>, overwrite: Overwrite) -> Result<()> {
        let tensors: Vec<(PlannedTensor, Vec<u8>)> = self.tensors().collect();
        let plan: Vec<PlannedTensor> = tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
        let mut writer = Writer::create(path, overwrite, plan, BTreeMap::from([self.metadata()]))?;
        for (tensor, bytes) in &tensors {
            writer.write(&tensor.name, bytes)?;
        }
        writer.finish()
    }

    /// Sets masks and levels to those of a checkpoint that holds [`Sparsifier::tensors`] and [`Sparsifier::metadata`],
    /// for exactly the parameters that are prepared here. Where it fails, nothing is changed. Rules are not stored.
    ///
    /// # Errors
    /// [`Error::Format`] for a file that holds no such state or that of other parameters or shapes,
    /// [`Error::FormatVersion`] for a newer one, and those of [`Reader::open`].
    pub fn load(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.load_from(&Reader::open(path)?)
    }

    /// [`Sparsifier::load`] from a file that is open already.
    ///
    /// # Errors
    /// Those of [`Sparsifier::load`], but for opening the file.
    pub fn load_from(&mut self, reader: &Reader) -> Result<()> {
        let fault = |reason: String| Error::Format { path: reader.path().to_owned(), reason };
        let text = reader.shards().iter().find_map(|shard| shard.metadata().get(KEY));
        let text =
            text.ok_or_else(|| fault(format!("its metadata has no entry `{KEY}`: it holds no masks of a sparsifier")))?;
        let state: State = serde_json::from_str(text).map_err(|e| fault(format!("metadata `{KEY}`: {e}")))?;
        if state.version > VERSION {
            let path = reader.path().to_owned();
            return Err(Error::FormatVersion { path, found: state.version, newest: VERSION });
        }
        if let Some(name) = state.parameters.keys().find(|name| !self.parameters.contains_key(*name)) {
            return Err(fault(format!("it holds a mask of `{name}`, which is not prepared")));
        }
        let mut masks = HashMap::new();
        for (name, parameter) in &self.parameters {
            let stored = state.parameters.get(name).ok_or_else(|| fault(format!("it holds no mask of `{name}`")))?;
            let (rows, cols) = (parameter.mask.rows(), parameter.mask.cols());
            let key = format!("{name}{SUFFIX}");
            let tensor = reader.tensor(&key)?;
            let shape = [rows, cols.div_ceil(8)];
            if stored.cols != cols || tensor.info.shape != shape || tensor.info.dtype != StoredDType::U8 {
                return Err(fault(format!("tensor `{key}` is no mask of a weight [{rows}, {cols}]")));
            }
            if !(stored.level.is_finite() && stored.base_level.is_finite()) {
                return Err(fault(format!("the level of `{name}` is not finite")));
            }
            let bytes = tensor.bytes()?;
            let mut mask = Mask::empty(rows, cols);
            for (row, bytes) in bytes.chunks(shape[1].max(1)).enumerate() {
                if cols % 8 > 0 && bytes[shape[1] - 1] >> (cols % 8) != 0 {
                    return Err(fault(format!("tensor `{key}`, row {row}: bits past the last column are set")));
                }
                (0..cols).filter(|col| bytes[col / 8] >> (col % 8) & 1 == 1).for_each(|col| mask.keep(row, col));
            }
            masks.insert(name.clone(), (mask, stored.base_level, stored.level));
        }
        for (name, parameter) in &mut self.parameters {
            if let Some((mask, base_level, level)) = masks.remove(name) {
                (parameter.mask, parameter.base_level, parameter.level) = (mask, base_level, level);
            }
        }
        Ok(())
    }
}
