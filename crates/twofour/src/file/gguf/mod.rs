//! GGUF as a source: models of llama.cpp, as transformers has them.
//!
//! Tensors appear under the names, in the shapes and in the order of elements that transformers uses, in one
//! floating-point type; quantized blocks are decoded as they are read. `config.json`, the tokenizer and the chat
//! template follow from the metadata. What differs between the two, by family: `families`.

mod encoding;
mod families;
mod metadata;
#[cfg(test)]
mod tests;
mod tokenizer;

use std::collections::BTreeMap;

use half::{bf16, f16};

use self::{
    families::{Change, Facts, Family},
    metadata::{Metadata, Stored},
};
use super::{FileBytes, Source, StoredDType, TensorInfo, unique::quoted};
use crate::{Error, Result, memory};

/// A file of llama.cpp.
#[derive(Debug)]
pub(super) struct Gguf {
    file: FileBytes,
    metadata: Metadata,
    family: &'static Family,
    /// The type in which elements appear.
    dtype: StoredDType,
    tensors: Vec<TensorInfo>,
    stored: Vec<Tensor>,
    /// Of a file in safetensors.
    described: BTreeMap<String, String>,
    /// By how much the wavelengths of rotary positions are longer, where that is stored.
    wavelengths: Vec<f32>,
}

/// A tensor as it is stored, and how it differs from what transformers has.
#[derive(Debug)]
struct Tensor {
    stored: Stored,
    change: Change,
    /// Rows of a head, where [`Change::Rotary`] needs them.
    head: usize,
}

/// The tensor of the factors of rotary positions, which is no weight.
const WAVELENGTHS: &str = "rope_freqs.weight";

impl Gguf {
    /// Reads and checks the header.
    pub(super) fn open(file: FileBytes) -> Result<Self> {
        let contents = metadata::read(&file)?;
        let fault = |reason: String| Error::Format { path: file.path().to_owned(), reason };
        let metadata = contents.metadata;
        let family = Family::of(&metadata).map_err(fault)?;
        let dtype = family.dtype(&contents.tensors);
        let heads = Facts::new(&metadata, family, &contents.tensors, &[]).heads().map_err(fault)?;
        let mut wavelengths = Vec::new();
        let (mut tensors, mut stored) = (Vec::new(), Vec::new());
        for tensor in contents.tensors {
            if tensor.name == WAVELENGTHS {
                wavelengths = decoded(&file, &tensor)?;
                continue;
            }
            let (name, change) = family
                .named(&tensor.name)
                .ok_or_else(|| fault(format!("tensor {} is none of {}", quoted(&tensor.name), family.architecture)))?;
            let head = head_of(&tensor, change, heads)
                .map_err(|reason| fault(format!("tensor {}: {reason}", quoted(&tensor.name))))?;
            let mut shape = tensor.shape.clone();
            if change == Change::Transposed {
                shape.reverse();
            }
            let bytes = dtype.bytes(&shape).ok_or_else(|| Error::TooLarge { shape: shape.clone() }.in_tensor(&name))?;
            tensors.push(TensorInfo { name, dtype, shape, bytes, place: stored.len() });
            stored.push(Tensor { stored: tensor, change, head });
        }
        // As transformers marks files for PyTorch.
        let described = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        Ok(Gguf { file, metadata, family, dtype, tensors, stored, described, wavelengths })
    }

    /// What the elements from that one on are in transformers' order.
    fn values(&self, tensor: &Tensor, first: usize, count: usize) -> Result<Vec<f32>> {
        let mut values = memory::zeroed(count)?;
        match tensor.change {
            _ if count == 0 => {}
            Change::Transposed => self.columns(&tensor.stored, first, &mut values)?,
            _ => self.rows(tensor, first, &mut values)?,
        }
        if tensor.change == Change::LessOne {
            values.iter_mut().for_each(|value| *value -= 1.0);
        }
        Ok(values)
    }

    /// Elements of a tensor whose rows are stored as rows, in whatever order.
    fn rows(&self, Tensor { stored, change, head }: &Tensor, first: usize, values: &mut [f32]) -> Result<()> {
        let is_rotary = matches!(change, Change::Rotary { .. });
        // A bias of heads is a column.
        let width = if is_rotary && stored.shape.len() == 1 { 1 } else { stored.row() };
        let row_bytes = width / stored.encoding.elements * stored.encoding.bytes;
        let (top, bottom) = (first / width, (first + values.len() - 1) / width);
        // The rows of a head have another order among themselves.
        let (begin, end) = match is_rotary {
            true => (top / head * head, (bottom / head + 1) * head),
            false => (top, bottom + 1),
        };
        let bytes = self.file.copy_of(stored.start + begin * row_bytes..stored.start + end * row_bytes)?;
        let mut row = memory::zeroed(width)?;
        for place in top..=bottom {
            let from = if is_rotary { rotated(place, *head) } else { place } - begin;
            decode(stored, &bytes[from * row_bytes..][..row_bytes], &mut row);
            let (left, right) = (place * width, (place + 1) * width);
            let (left, right) = (left.max(first), right.min(first + values.len()));
            values[left - first..right - first].copy_from_slice(&row[left - place * width..right - place * width]);
        }
        Ok(())
    }

    /// Elements of a tensor whose rows are stored as columns.
    fn columns(&self, stored: &Stored, first: usize, values: &mut [f32]) -> Result<()> {
        let (height, encoding) = (stored.shape[0], stored.encoding);
        let last = first + values.len() - 1;
        let (blocks, end) = (first / height / encoding.elements, last / height / encoding.elements + 1);
        let mut bytes = memory::zeroed::<u8>((end - blocks) * encoding.bytes)?;
        let mut row = memory::zeroed::<f32>((end - blocks) * encoding.elements)?;
        for column in 0..height {
            let start = stored.start + column * stored.row_bytes() + blocks * encoding.bytes;
            self.file.read_into(start, &mut bytes)?;
            decode(stored, &bytes, &mut row);
            for place in first / height..=last / height {
                let at = place * height + column;
                if (first..=last).contains(&at) {
                    values[at - first] = row[place - blocks * encoding.elements];
                }
            }
        }
        Ok(())
    }

    fn facts(&self) -> Facts<'_> {
        Facts::new(&self.metadata, self.family, self.stored.iter().map(|tensor| &tensor.stored), &self.wavelengths)
    }
}

/// The rows of a head, where the change needs them.
fn head_of(tensor: &Stored, change: Change, heads: (usize, usize)) -> std::result::Result<usize, String> {
    let (shape, block) = (&tensor.shape, tensor.encoding.elements);
    let heads = match change {
        Change::Transposed if shape.len() != 2 => {
            return Err(format!("its shape is {shape:?}, and a matrix is expected"));
        }
        _ if shape.len() > 2 => return Err(format!("its shape is {shape:?}, and two dimensions at most are expected")),
        Change::Rotary { .. } if shape.len() == 1 && block > 1 => {
            return Err(format!("it is a bias in {}, and a floating-point type is expected", tensor.encoding.name));
        }
        Change::Rotary { of_keys: true } => heads.1,
        Change::Rotary { of_keys: false } => heads.0,
        _ => return Ok(0),
    };
    match heads {
        1.. if shape[0].is_multiple_of(heads) && (shape[0] / heads).is_multiple_of(2) => Ok(shape[0] / heads),
        _ => Err(format!("its {} rows are no pairs of {heads} heads", shape[0])),
    }
}

/// The row that llama.cpp stores in the place of this one: it turns neighbours together, where transformers turns
/// elements that are half a head apart.
fn rotated(row: usize, head: usize) -> usize {
    let (start, inside) = (row / head * head, row % head);
    start + inside % (head / 2) * 2 + inside / (head / 2)
}

/// Decodes whole blocks.
fn decode(stored: &Stored, bytes: &[u8], values: &mut [f32]) {
    let encoding = stored.encoding;
    for (block, values) in bytes.chunks_exact(encoding.bytes).zip(values.chunks_exact_mut(encoding.elements)) {
        (encoding.decode)(block, values);
    }
}

/// All elements of a small tensor.
fn decoded(file: &FileBytes, stored: &Stored) -> Result<Vec<f32>> {
    let rows: usize = stored.shape.iter().rev().skip(1).product();
    let bytes = file.copy_of(stored.start..stored.start + rows * stored.row_bytes())?;
    let mut values = memory::zeroed(rows * stored.row())?;
    decode(stored, &bytes, &mut values);
    Ok(values)
}

impl Source for Gguf {
    fn file(&self) -> &FileBytes {
        &self.file
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.described
    }

    fn read(&self, tensor: &TensorInfo, first: usize, buffer: &mut [u8]) -> Result<()> {
        let size = self.dtype.bits() / 8;
        let values = self.values(&self.stored[tensor.place], first / size, buffer.len() / size)?;
        for (i, (value, bytes)) in values.iter().zip(buffer.chunks_exact_mut(size)).enumerate() {
            let kept = match self.dtype {
                StoredDType::F16 => {
                    let kept = f16::from_f32(*value);
                    bytes.copy_from_slice(&kept.to_le_bytes());
                    kept.to_f32()
                }
                StoredDType::BF16 => {
                    let kept = bf16::from_f32(*value);
                    bytes.copy_from_slice(&kept.to_le_bytes());
                    kept.to_f32()
                }
                _ => {
                    bytes.copy_from_slice(&value.to_le_bytes());
                    *value
                }
            };
            if kept.is_infinite() && value.is_finite() {
                let (name, at, dtype) = (quoted(&tensor.name), first / size + i, self.dtype);
                let reason =
                    format!("tensor {name}, element {at}: {value} is beyond {dtype}, in which this model is read");
                return Err(Error::Format { path: self.file.path().to_owned(), reason });
            }
        }
        Ok(())
    }

    fn in_memory(&self, _: &TensorInfo) -> Option<&[u8]> {
        None
    }

    fn described(&self) -> &'static [&'static str] {
        &["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    }

    fn describe(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let described = match name {
            "config.json" => self.family.config(&self.facts(), self.dtype).map(Some),
            "generation_config.json" => tokenizer::generation(&self.metadata).map(Some),
            "tokenizer.json" => tokenizer::tokenizer(&self.metadata),
            "tokenizer_config.json" => tokenizer::settings(&self.metadata),
            _ => Ok(None),
        };
        let described = described.map_err(|reason| Error::Format { path: self.file.path().to_owned(), reason })?;
        // A Value with string keys always serialises; `{:#}` is its indented form.
        Ok(described.map(|value| format!("{value:#}\n").into_bytes()))
    }
}
