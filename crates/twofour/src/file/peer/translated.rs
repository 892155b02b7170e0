//! Files whose weights of other tools appear as this library's.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    super::{CompressedInfo, FileBytes, MANIFEST_KEY, Source, TensorInfo, manifest},
    ACTIVATIONS, Decoded, FORMATS, Form, PeerFormat,
    tensors::{Parts, Tensors},
};
use crate::{Error, Result};

/// Weights of other tools that a model has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Translation {
    /// How many weights there are of each format.
    pub weights: BTreeMap<&'static str, usize>,
    /// The tensors that are passed over: scales of activations, which are quantized for each token here.
    pub left_out: Vec<String>,
}

/// A weight of another tool.
#[derive(Debug)]
struct Found {
    module: String,
    format: &'static dyn PeerFormat,
    form: Form,
    /// The number of the file that holds it, for a reader.
    file: usize,
}

/// The bytes of a weight's tensors, as this library has them.
type DecodedBytes = Arc<Vec<Vec<u8>>>;

/// A model with weights of other tools.
#[derive(Debug)]
struct Model {
    tensors: Tensors,
    weights: Vec<Found>,
    /// The weight that was read last, and its bytes. A tensor is read in pieces, and a weight has several tensors.
    last: Mutex<Option<(usize, DecodedBytes)>>,
}

impl Model {
    fn decoded(&self, weight: usize) -> Result<DecodedBytes> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((of, bytes)) if *of == weight => Ok(bytes.clone()),
            _ => {
                // The memory of one weight goes before that of the next comes.
                *last = None;
                let Found { module, format, .. } = &self.weights[weight];
                let bytes = Arc::new(decode(&self.tensors, module, *format)?.bytes);
                *last = Some((weight, bytes.clone()));
                Ok(bytes)
            }
        }
    }
}

/// Decodes a weight; errors name it.
fn decode(tensors: &Tensors, module: &str, format: &'static dyn PeerFormat) -> Result<Decoded> {
    let parts = Parts { tensors, module, format };
    format.decode(&parts).map_err(|error| match error {
        Error::Io { .. } | Error::Format { .. } => error,
        error => parts.fault(error.to_string()),
    })
}

/// A file of such a model.
#[derive(Debug)]
struct Translated {
    model: Arc<Model>,
    file: usize,
    tensors: Vec<TensorInfo>,
    metadata: BTreeMap<String, String>,
    /// Weight and part of the tensors that no file has, by name.
    parts: HashMap<String, (usize, usize)>,
}

/// The files of a model with the weights of other tools as this library has them, and what was found; `compressed` are
/// the weights that each file holds already. Every weight is decoded once, to know what it is.
///
/// # Errors
/// For a weight that its format does not allow, or that this library has no form for.
pub(in super::super) fn translate(
    files: Vec<Box<dyn Source>>,
    compressed: &[Vec<CompressedInfo>],
) -> Result<(Vec<Box<dyn Source>>, Translation)> {
    let tensors = Tensors::new(files);
    let (mut weights, mut used, mut translation) = (Vec::new(), HashSet::new(), Translation::default());
    for (file, source) in tensors.files.iter().enumerate() {
        for tensor in source.tensors() {
            let Some((module, end)) = tensor.name.rsplit_once('.') else { continue };
            let parts_of = |format| Parts { tensors: &tensors, module, format };
            let is_of = |format: &&&'static dyn PeerFormat| {
                let (required, parts) = (format.required(), parts_of(**format));
                required.first() == Some(&end)
                    && required.iter().all(|end| parts.get(end).is_some())
                    && format.is_format_of(&parts)
            };
            let Some(&format) = FORMATS.iter().find(is_of) else { continue };
            let parts = parts_of(format);
            let form = decode(&tensors, module, format)?.form;
            *translation.weights.entry(format.name()).or_default() += 1;
            for end in format.required().iter().chain(format.optional()).filter(|end| parts.get(end).is_some()) {
                if ACTIVATIONS.contains(end) {
                    translation.left_out.push(parts.key(end));
                }
                used.insert(parts.key(end));
            }
            weights.push(Found { module: module.to_owned(), format, form, file });
        }
    }
    if weights.is_empty() {
        return Ok((tensors.files, translation));
    }
    let model = Arc::new(Model { tensors, weights, last: Mutex::new(None) });
    let file = |file| Translated::new(&model, file, &used, compressed.get(file).map_or(&[], Vec::as_slice));
    let files = (0..model.tensors.files.len()).map(|number| Ok(Box::new(file(number)?) as Box<dyn Source>));
    Ok((files.collect::<Result<_>>()?, translation))
}

impl Translated {
    fn new(model: &Arc<Model>, file: usize, used: &HashSet<String>, compressed: &[CompressedInfo]) -> Result<Self> {
        let source = &model.tensors.files[file];
        let own = source.tensors().iter().filter(|tensor| !used.contains(&tensor.name));
        let mut tensors: Vec<TensorInfo> = own.cloned().collect();
        let (mut parts, mut listed) = (HashMap::new(), compressed.iter().collect::<Vec<_>>());
        for (number, weight) in model.weights.iter().enumerate().filter(|(_, weight)| weight.file == file) {
            for (part, tensor) in weight.form.tensors().into_iter().enumerate() {
                let bytes = tensor.dtype.bytes(&tensor.shape);
                let bytes = bytes.ok_or_else(|| Error::TooLarge { shape: tensor.shape.clone() })?;
                parts.insert(tensor.name.clone(), (number, part));
                let (name, dtype, shape) = (tensor.name, tensor.dtype, tensor.shape);
                tensors.push(TensorInfo { name, dtype, shape, bytes, place: 0 });
            }
            if let Form::Compressed(weight) = &weight.form {
                listed.push(weight);
            }
        }
        let mut metadata = source.metadata().clone();
        if !listed.is_empty() {
            metadata.insert(MANIFEST_KEY.to_owned(), manifest::to_json(listed));
        }
        Ok(Translated { model: model.clone(), file, tensors, metadata, parts })
    }

    fn source(&self) -> &dyn Source {
        &*self.model.tensors.files[self.file]
    }
}

impl Source for Translated {
    fn file(&self) -> &FileBytes {
        self.source().file()
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn read(&self, tensor: &TensorInfo, first: usize, buffer: &mut [u8]) -> Result<()> {
        let Some(&(weight, part)) = self.parts.get(&tensor.name) else {
            return self.source().read(tensor, first, buffer);
        };
        let decoded = self.model.decoded(weight)?;
        let bytes = decoded.get(part).and_then(|bytes| bytes.get(first..)?.get(..buffer.len()));
        let Some(bytes) = bytes else {
            let reason = "the file was written to while it was open; open it again".to_owned();
            return Err(Error::Format { path: self.file().path().to_owned(), reason });
        };
        buffer.copy_from_slice(bytes);
        Ok(())
    }

    fn in_memory(&self, tensor: &TensorInfo) -> Option<&[u8]> {
        if self.parts.contains_key(&tensor.name) { None } else { self.source().in_memory(tensor) }
    }

    fn below(&self) -> Option<&dyn Source> {
        Some(self.source())
    }
}
