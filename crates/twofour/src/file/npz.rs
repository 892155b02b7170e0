//! Files of numpy's `savez` and `savez_compressed` as a source: an archive with an entry `NAME.npy` for each array.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use super::{FileBytes, Source, StoredDType, TensorInfo, archive::Entry, unique::quoted};
use crate::{Error, Result, memory};

/// The end of the name of an array's entry.
const END: &str = ".npy";

/// The first bytes of an array.
const MARK: &[u8] = b"\x93NUMPY";

/// A file of arrays.
#[derive(Debug)]
pub(super) struct Npz {
    file: FileBytes,
    tensors: Vec<TensorInfo>,
    /// The entry of each tensor, and the length of its header.
    entries: Vec<(Entry, usize)>,
    metadata: BTreeMap<String, String>,
    /// The compressed entry that was read last, and its bytes.
    last: Mutex<Option<(usize, Arc<Vec<u8>>)>>,
}

impl Npz {
    /// Reads the headers of the arrays.
    pub(super) fn open(file: FileBytes, entries: Vec<Entry>) -> Result<Self> {
        let (mut tensors, mut kept) = (Vec::<TensorInfo>::new(), Vec::new());
        for entry in entries {
            let fault = |reason: String| {
                let reason = format!("array {}: {reason}", quoted(&entry.name));
                Error::Format { path: file.path().to_owned(), reason }
            };
            let name = entry.name.strip_suffix(END).ok_or_else(|| fault("is no array of numpy".to_owned()))?.to_owned();
            if tensors.iter().any(|tensor| tensor.name == name) {
                return Err(fault("is there twice".to_owned()));
            }
            let (header, length) = header(&file, &entry).map_err(fault)?;
            let (dtype, shape) = described(&header).map_err(fault)?;
            let bytes = dtype.bytes(&shape).filter(|bytes| Some(*bytes) == entry.length.checked_sub(length));
            let bytes = bytes.ok_or_else(|| fault(format!("{dtype} of shape {shape:?} does not fill its entry")))?;
            tensors.push(TensorInfo { name, dtype, shape, bytes, place: kept.len() });
            kept.push((entry, length));
        }
        let last = Mutex::new(None);
        Ok(Npz { file, tensors, entries: kept, metadata: BTreeMap::new(), last })
    }

    /// The bytes of a compressed entry.
    fn inflated(&self, place: usize) -> Result<Arc<Vec<u8>>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, bytes)) = last.as_ref().filter(|(of, _)| *of == place) {
            return Ok(bytes.clone());
        }
        // The memory of one array goes before that of the next comes.
        *last = None;
        let (entry, _) = &self.entries[place];
        let mut bytes = memory::zeroed(entry.length)?;
        let action = "decompressing an array";
        entry.read(&self.file, &mut bytes).map_err(|source| Error::Io {
            path: self.file.path().to_owned(),
            action,
            source,
        })?;
        let bytes = Arc::new(bytes);
        *last = Some((place, bytes.clone()));
        Ok(bytes)
    }
}

impl Source for Npz {
    fn file(&self) -> &FileBytes {
        &self.file
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn read(&self, tensor: &TensorInfo, first: usize, buffer: &mut [u8]) -> Result<()> {
        let (entry, header) = &self.entries[tensor.place];
        if !entry.is_deflated {
            return self.file.read_into(entry.range.start + header + first, buffer);
        }
        buffer.copy_from_slice(&self.inflated(tensor.place)?[header + first..][..buffer.len()]);
        Ok(())
    }

    fn in_memory(&self, _: &TensorInfo) -> Option<&[u8]> {
        None
    }
}

/// The text of an array's header, and the bytes before its elements.
fn header(file: &FileBytes, entry: &Entry) -> Result<(String, usize), String> {
    let first = |count: usize| -> Result<Vec<u8>, String> {
        if count > entry.length {
            return Err("ends in its header".to_owned());
        }
        let mut bytes = memory::zeroed(count).map_err(|error| error.to_string())?;
        entry.read(file, &mut bytes).map_err(|error| format!("is damaged: {error}"))?;
        Ok(bytes)
    };
    let start = first(12.min(entry.length))?;
    let &[major, _, a, b, c, d] = start.strip_prefix(MARK).unwrap_or_default() else {
        return Err("is no array of numpy".to_owned());
    };
    let (at, length) = match major {
        1 => (10, usize::from(u16::from_le_bytes([a, b]))),
        _ => (12, u32::from_le_bytes([a, b, c, d]) as usize),
    };
    let end = at + length;
    let text = String::from_utf8_lossy(&first(end)?[at..]).into_owned();
    Ok((text, end))
}

/// The dtype and shape that a header tells, such as `{'descr': '|u1', 'fortran_order': False, 'shape': (24,), }`.
fn described(header: &str) -> Result<(StoredDType, Vec<usize>), String> {
    let value = |key: &str| {
        let rest = header.split_once(&format!("'{key}':")).map(|(_, rest)| rest.trim_start());
        rest.ok_or_else(|| format!("its header has no {key}"))
    };
    let descr = value("descr")?;
    let descr = descr.strip_prefix('\'').and_then(|rest| rest.split_once('\'')).map(|(descr, _)| descr);
    let descr = descr.ok_or("its elements are records, which are no tensor's")?;
    let dtype = dtype_of(descr).ok_or_else(|| format!("its elements are {}, which no tensor has", quoted(descr)))?;
    let text = value("shape")?.strip_prefix('(').and_then(|rest| rest.split_once(')')).map(|(sizes, _)| sizes);
    let sizes = text.ok_or("its shape is no tuple")?.split(',').map(str::trim).filter(|size| !size.is_empty());
    let shape: Vec<usize> = sizes
        .map(|size| size.parse().map_err(|_| format!("its shape has {}", quoted(size))))
        .collect::<Result<_, _>>()?;
    if value("fortran_order")?.starts_with("True") && shape.len() > 1 {
        return Err(
            "its elements are in Fortran's order, columns first; save it with numpy.ascontiguousarray".to_owned()
        );
    }
    Ok((dtype, shape))
}

fn dtype_of(descr: &str) -> Option<StoredDType> {
    const NAMES: [(&str, StoredDType); 13] = [
        ("|b1", StoredDType::Bool),
        ("|u1", StoredDType::U8),
        ("|i1", StoredDType::I8),
        ("<f2", StoredDType::F16),
        ("<f4", StoredDType::F32),
        ("<f8", StoredDType::F64),
        ("<i2", StoredDType::I16),
        ("<i4", StoredDType::I32),
        ("<i8", StoredDType::I64),
        ("<u2", StoredDType::U16),
        ("<u4", StoredDType::U32),
        ("<u8", StoredDType::U64),
        ("<c8", StoredDType::C64),
    ];
    NAMES.iter().find(|(name, _)| *name == descr).map(|(_, dtype)| *dtype)
}
