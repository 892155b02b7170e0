//! Files of `torch.save` as a source: `pytorch_model.bin` of transformers, `.pt`, `.pth` and `.ckpt` files with a state
//! dict. No code of the file is run.
//!
//! The format is PyTorch's since version 1.6: an archive with the pickle `data.pkl`, which describes tensors by
//! `torch._utils._rebuild_tensor_v2` and the like, and an entry `data/KEY` for each storage.

mod pickle;

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use self::pickle::{Id, Pickle, Value};
use super::{FileBytes, MAX_HEADER_BYTES, Source, StoredDType, TensorInfo, archive::Entry, unique::quoted};
use crate::{Error, Result};

/// Entries of a training checkpoint that hold the model's state dict.
const STATE_DICTS: [&str; 4] = ["state_dict", "model_state_dict", "model", "module"];

/// A file of `torch.save`.
#[derive(Debug)]
pub(super) struct PyTorch {
    file: FileBytes,
    tensors: Vec<TensorInfo>,
    /// Where the elements of each tensor lie.
    stored: Vec<Stored>,
    described: BTreeMap<String, String>,
}

/// Where a tensor's elements lie.
#[derive(Debug, Clone)]
struct Stored {
    dtype: StoredDType,
    shape: Vec<usize>,
    /// Elements between neighbours along each dimension.
    strides: Vec<usize>,
    /// The first byte in the file.
    start: usize,
}

impl PyTorch {
    /// Reads the description of the tensors.
    pub(super) fn open(file: FileBytes, entries: Vec<Entry>) -> Result<Self> {
        let fault = |reason: String| Error::Format { path: file.path().to_owned(), reason };
        let archive = inside(entries).map_err(fault)?;
        let Some(range) = archive.get("data.pkl").cloned() else {
            return Err(fault("is a zip archive without data.pkl, and no file of torch.save".to_owned()));
        };
        if range.len() > MAX_HEADER_BYTES {
            return Err(fault(format!("its pickle of {} bytes is too long", range.len())));
        }
        if let Some(order) = archive.get("byteorder") {
            let order = file.copy_of(order.start..order.end.min(order.start + 8))?;
            if order != b"little" {
                return Err(fault(
                    "its bytes are in big-endian order; save it again on a little-endian machine".to_owned(),
                ));
            }
        }
        let pickle = Pickle::parse(&file.copy_of(range)?).map_err(fault)?;
        let state = Description { pickle: &pickle, archive: &archive };
        let mut found = state.tensors().map_err(fault)?;
        found.sort_by_key(|(_, stored)| stored.start);
        let (mut tensors, mut kept) = (Vec::new(), Vec::new());
        for (name, stored) in found {
            let bytes = stored.dtype.bytes(&stored.shape);
            let bytes = bytes.ok_or_else(|| Error::TooLarge { shape: stored.shape.clone() }.in_tensor(&name))?;
            tensors.push(TensorInfo {
                name,
                dtype: stored.dtype,
                shape: stored.shape.clone(),
                bytes,
                place: kept.len(),
            });
            kept.push(stored);
        }
        let described = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        Ok(PyTorch { file, tensors, stored: kept, described })
    }
}

impl Source for PyTorch {
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
        let stored = &self.stored[tensor.place];
        if stored.is_contiguous() {
            return self.file.read_into(stored.start + first, buffer);
        }
        let size = stored.dtype.bits() / 8;
        let elements = first / size..(first + buffer.len()) / size;
        let Some(span) = stored.span(elements.clone()) else { return Ok(()) };
        let bytes = self.file.copy_of(stored.start + span.start * size..stored.start + span.end * size)?;
        for (element, buffer) in elements.zip(buffer.chunks_exact_mut(size)) {
            buffer.copy_from_slice(&bytes[(stored.place(element) - span.start) * size..][..size]);
        }
        Ok(())
    }

    fn in_memory(&self, _: &TensorInfo) -> Option<&[u8]> {
        None
    }
}

impl Stored {
    /// Whether the elements lie one after another, row-major.
    fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let is_next = size <= 1 || stride == expected;
            expected = size.max(1).saturating_mul(expected);
            is_next
        })
    }

    /// Where an element lies, in elements from the first.
    fn place(&self, mut element: usize) -> usize {
        let dimensions = self.shape.iter().zip(&self.strides).rev();
        dimensions.fold(0, |place, (&size, &stride)| {
            let index = element % size;
            element /= size;
            place + index * stride
        })
    }

    /// The places between which elements lie.
    fn span(&self, elements: Range<usize>) -> Option<Range<usize>> {
        let places = || elements.clone().map(|element| self.place(element));
        Some(places().min()?..places().max()? + 1)
    }
}

/// Where each entry's bytes lie in the file, by its name below the archive's one folder.
fn inside(entries: Vec<Entry>) -> Found<HashMap<String, Range<usize>>> {
    let mut places = HashMap::new();
    for Entry { name, range, is_deflated, .. } in entries {
        if is_deflated {
            return Err(format!("entry {} of the archive is compressed, as torch.save writes none", quoted(&name)));
        }
        let inside = name.split_once('/').map_or(name.as_str(), |(_, inside)| inside).to_owned();
        if places.insert(inside, range).is_some() {
            return Err(format!("the archive has two entries {}", quoted(&name)));
        }
    }
    Ok(places)
}

/// What a pickle says of tensors.
struct Description<'a> {
    pickle: &'a Pickle,
    archive: &'a HashMap<String, Range<usize>>,
}

type Found<T> = std::result::Result<T, String>;

impl Description<'_> {
    /// The tensors of the state dict by name.
    fn tensors(&self) -> Found<Vec<(String, Stored)>> {
        let top = self.pickle.top();
        let Some(entries) = self.pickle.entries(top) else {
            return Err(match self.called(top) {
                Some(class) => format!(
                    "holds an object of {}, and a dictionary of tensors is expected; save model.state_dict()",
                    quoted(&class)
                ),
                None => "holds no dictionary of tensors; save model.state_dict()".to_owned(),
            });
        };
        let own = self.tensors_of(entries)?;
        if !own.is_empty() {
            return Ok(own);
        }
        for (key, value) in entries {
            if let (Value::Text(key), Some(entries)) = (self.pickle.get(*key), self.pickle.entries(*value))
                && STATE_DICTS.contains(&key.as_str())
            {
                let inside = self.tensors_of(entries)?;
                if !inside.is_empty() {
                    return Ok(inside);
                }
            }
        }
        Err(format!("holds no tensor by name, neither itself nor as {}", STATE_DICTS.join(", ")))
    }

    fn tensors_of(&self, entries: &[(Id, Id)]) -> Found<Vec<(String, Stored)>> {
        let mut tensors = BTreeMap::new();
        for (key, value) in entries {
            let Value::Text(name) = self.pickle.get(*key) else { continue };
            let parts = self.semi_structured(*value).map_err(|reason| format!("tensor {}: {reason}", quoted(name)))?;
            if let Some(parts) = parts {
                tensors.extend(parts.map(|(end, part)| (format!("{name}.{end}"), part)));
                continue;
            }
            let tensor = self.tensor(*value).map_err(|reason| format!("tensor {}: {reason}", quoted(name)))?;
            if let Some(tensor) = tensor {
                // As in Python, the last of two equal keys counts.
                tensors.insert(name.clone(), tensor);
            }
        }
        Ok(tensors.into_iter().collect())
    }

    /// The name of what a value is a call of.
    fn called(&self, id: Id) -> Option<String> {
        let Value::Call { function, .. } = self.pickle.get(id) else { return None };
        self.global(*function)
    }

    fn global(&self, id: Id) -> Option<String> {
        match self.pickle.get(id) {
            Value::Global(module, name) => Some(format!("{module}.{name}")),
            _ => None,
        }
    }

    /// Describes a tensor; none for another value.
    fn tensor(&self, id: Id) -> Found<Option<Stored>> {
        let Value::Call { function, arguments, .. } = self.pickle.get(id) else { return Ok(None) };
        let (Some(function), Value::Tuple(arguments)) = (self.global(*function), self.pickle.get(*arguments)) else {
            return Ok(None);
        };
        match (function.as_str(), arguments.as_slice()) {
            ("torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state", [tensor, ..]) => {
                self.tensor(*tensor)
            }
            ("torch._utils._rebuild_tensor_v3", [storage, offset, shape, strides, _, _, dtype, ..]) => {
                self.stored(*storage, (*offset, *shape, *strides), Some(*dtype)).map(Some)
            }
            (
                "torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2",
                [storage, offset, shape, strides, ..],
            ) => self.stored(*storage, (*offset, *shape, *strides), None).map(Some),
            (name, _) if name.starts_with("torch.") && name.contains("_rebuild_") => Err(format!(
                "it is made by {name}, which is no plain tensor; load the file with PyTorch and save plain tensors"
            )),
            _ => Ok(None),
        }
    }

    /// The parts of a weight that torch compressed for CUTLASS (`torch.sparse.to_sparse_semi_structured`); none for
    /// another value.
    ///
    /// Such a tensor is a call of `_rebuild_from_type_v2` with a function, a class, the function's arguments and the
    /// object's state: a tuple whose second half has the parts by name.
    fn semi_structured(&self, id: Id) -> Found<Option<[(&'static str, Stored); 2]>> {
        let Value::Call { function, arguments, .. } = self.pickle.get(id) else { return Ok(None) };
        let (Some(function), Value::Tuple(arguments)) = (self.global(*function), self.pickle.get(*arguments)) else {
            return Ok(None);
        };
        let ("torch._tensor._rebuild_from_type_v2", &[_, class, of_function, state]) =
            (function.as_str(), arguments.as_slice())
        else {
            return Ok(None);
        };
        // Of a parameter the first argument has the class.
        let class = self.global(class).unwrap_or_default();
        let Some(kind) = class.strip_prefix("torch.sparse.semi_structured.SparseSemiStructuredTensor") else {
            return Err(format!(
                "it is an object of {}, which is no plain tensor; load the file with PyTorch and save plain tensors",
                quoted(&class)
            ));
        };
        if kind != "CUTLASS" {
            return Err(
                "it was compressed by cuSPARSELt, whose layout depends on its version and on the GPU; load the \
                        file on the machine that wrote it, and save the dense tensors, weight.to_dense()"
                    .to_owned(),
            );
        }
        let no_parts = || "it is compressed for CUTLASS, and its parts are not described".to_owned();
        let Value::Tuple(of_function) = self.pickle.get(of_function) else { return Err(no_parts()) };
        let Value::Tuple(state) = self.pickle.get(state) else { return Err(no_parts()) };
        let &[_, _, shape, ..] = of_function.as_slice() else { return Err(no_parts()) };
        let parts = state.get(1).and_then(|slots| self.pickle.entries(*slots)).ok_or_else(no_parts)?;
        let part = |name: &str| -> Found<Option<Stored>> {
            let is_it = |(key, _): &&(Id, Id)| matches!(self.pickle.get(*key), Value::Text(key) if key == name);
            parts.iter().rev().find(is_it).map_or(Ok(None), |(_, value)| self.tensor(*value))
        };
        let (Some(packed), Some(meta)) = (part("packed")?, part("meta")?) else {
            return Err(
                "it is compressed for CUTLASS without its rows, as its transpose is; save weight.to_dense()".to_owned()
            );
        };
        let shape = self.sizes(shape)?;
        let fits = match *shape {
            [rows, cols] => packed.shape == [rows, cols / 2] && cols.is_multiple_of(2),
            _ => false,
        };
        match fits {
            true => Ok(Some([("packed", packed), ("meta", meta)])),
            false => Err(format!("its kept values of shape {:?} are not those of {shape:?}", packed.shape)),
        }
    }

    fn stored(&self, storage: Id, (offset, shape, strides): (Id, Id, Id), dtype: Option<Id>) -> Found<Stored> {
        let Value::Persistent(storage) = self.pickle.get(storage) else { return Err("it has no storage".to_owned()) };
        let Value::Tuple(storage) = self.pickle.get(*storage) else {
            return Err("its storage has no description".to_owned());
        };
        let &[_, kind, key, ..] = storage.as_slice() else { return Err("its storage has no description".to_owned()) };
        let (Some(kind), Value::Text(key)) = (self.global(kind), self.pickle.get(key)) else {
            return Err("its storage has no type or no key".to_owned());
        };
        let name = match dtype {
            Some(dtype) => self.global(dtype).ok_or("its dtype has no name")?,
            None => kind,
        };
        let dtype = dtype_of(&name).ok_or_else(|| format!("{name} is no dtype of safetensors"))?;
        let entry = self.archive.get(&format!("data/{key}")).cloned();
        let entry = entry.ok_or_else(|| format!("its storage {} is not in the archive", quoted(key)))?;
        let (offset, shape, strides) = (self.size(offset)?, self.sizes(shape)?, self.sizes(strides)?);
        if shape.len() != strides.len() {
            return Err(format!("its shape {shape:?} has other dimensions than its strides {strides:?}"));
        }
        let size = dtype.bits() / 8;
        let is_empty = shape.contains(&0);
        let last = shape
            .iter()
            .zip(&strides)
            .try_fold(offset, |place, (&size, &stride)| place.checked_add(size.saturating_sub(1).checked_mul(stride)?));
        let end = last.and_then(|last| last.checked_add(1)?.checked_mul(size));
        match end {
            _ if is_empty => Ok(Stored { dtype, shape, strides, start: entry.start }),
            Some(end) if end <= entry.len() => Ok(Stored { dtype, shape, strides, start: entry.start + offset * size }),
            _ => Err(format!(
                "{dtype} of shape {shape:?} from element {offset} on does not fit into its storage of {} bytes; the \
                 file is truncated or damaged",
                entry.len()
            )),
        }
    }

    fn size(&self, id: Id) -> Found<usize> {
        match self.pickle.get(id) {
            Value::Int(size) => usize::try_from(*size).map_err(|_| format!("{size} is no size")),
            _ => Err("one of its sizes is no whole number".to_owned()),
        }
    }

    fn sizes(&self, id: Id) -> Found<Vec<usize>> {
        match self.pickle.get(id) {
            Value::Tuple(sizes) => sizes.iter().map(|size| self.size(*size)).collect(),
            // torch.Size is called with a tuple.
            Value::Call { arguments, .. } => match self.pickle.get(*arguments) {
                Value::Tuple(inner) if inner.len() == 1 && matches!(self.pickle.get(inner[0]), Value::Tuple(_)) => {
                    self.sizes(inner[0])
                }
                _ => Err("its shape is no tuple".to_owned()),
            },
            _ => Err("its shape is no tuple".to_owned()),
        }
    }
}

/// The dtype of a typed storage, or of a tensor by its own name.
fn dtype_of(name: &str) -> Option<StoredDType> {
    const NAMES: [(&str, &str, StoredDType); 18] = [
        ("FloatStorage", "float32", StoredDType::F32),
        ("DoubleStorage", "float64", StoredDType::F64),
        ("HalfStorage", "float16", StoredDType::F16),
        ("BFloat16Storage", "bfloat16", StoredDType::BF16),
        ("LongStorage", "int64", StoredDType::I64),
        ("IntStorage", "int32", StoredDType::I32),
        ("ShortStorage", "int16", StoredDType::I16),
        ("CharStorage", "int8", StoredDType::I8),
        ("ByteStorage", "uint8", StoredDType::U8),
        ("BoolStorage", "bool", StoredDType::Bool),
        ("ComplexFloatStorage", "complex64", StoredDType::C64),
        ("", "uint16", StoredDType::U16),
        ("", "uint32", StoredDType::U32),
        ("", "uint64", StoredDType::U64),
        ("", "float8_e4m3fn", StoredDType::F8E4M3),
        ("", "float8_e4m3fnuz", StoredDType::F8E4M3Fnuz),
        ("", "float8_e5m2", StoredDType::F8E5M2),
        ("", "float8_e5m2fnuz", StoredDType::F8E5M2Fnuz),
    ];
    let name = name.strip_prefix("torch.")?;
    NAMES.iter().find(|(storage, dtype, _)| *storage == name || *dtype == name).map(|(.., found)| *found)
}

#[cfg(test)]
mod tests;
