//! Tensors of three dimensions, as of experts, taken apart into matrices: each `[out, in]`, under a name of its own.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use serde::Deserialize;
use serde_json::json;

use super::{FileBytes, Source, StoredDType, TensorInfo, unique::quoted};
use crate::{Error, Result, memory};

/// The metadata name under which a file says which of its matrices are one tensor of three dimensions in the model.
pub const STACKS_KEY: &str = "twofour.stacks";

/// Matrices of one tensor are not more.
const MOST: usize = 1 << 16;

/// A tensor of three dimensions whose matrices are tensors of their own: that of `a.experts.up`, number 3, is
/// `a.experts.3.up.weight`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stack {
    /// The tensor's name.
    pub name: String,
    /// Its shape.
    pub shape: [usize; 3],
    /// Whether its matrices are `[in, out]`, the transposes of those of their own.
    pub is_transposed: bool,
}

impl Stack {
    /// What stands in front of a matrix's number, and behind it.
    fn around(&self) -> (&str, String) {
        let parameter = self.name.strip_suffix(".weight").unwrap_or(&self.name);
        let at = parameter.rfind('.').map_or(0, |at| at + 1);
        (&parameter[..at], format!(".{}.weight", &parameter[at..]))
    }

    /// The number of matrices.
    pub fn count(&self) -> usize {
        self.shape[0]
    }

    /// The name of a matrix.
    pub fn matrix(&self, number: usize) -> String {
        let (before, behind) = self.around();
        format!("{before}{number}{behind}")
    }

    /// The rows and columns of a matrix: outputs and inputs.
    pub fn matrix_shape(&self) -> [usize; 2] {
        let [_, rows, cols] = self.shape;
        if self.is_transposed { [cols, rows] } else { [rows, cols] }
    }

    /// The number of the matrix of that name.
    pub fn number_of(&self, name: &str) -> Option<usize> {
        let (before, behind) = self.around();
        let number: usize = name.strip_prefix(before)?.strip_suffix(&behind)?.parse().ok()?;
        (number < self.count() && self.matrix(number) == name).then_some(number)
    }
}

#[derive(Deserialize)]
struct RawStack {
    shape: [usize; 3],
    transposed: bool,
}

/// The metadata's text for these.
pub(super) fn to_json(stacks: &[Stack]) -> String {
    let entry =
        |stack: &Stack| (stack.name.clone(), json!({ "shape": stack.shape, "transposed": stack.is_transposed }));
    serde_json::Value::Object(stacks.iter().map(entry).collect()).to_string()
}

/// Those that a file's metadata tell, in order of name, in a model of so many tensors.
pub(super) fn parse(path: &Path, metadata: &BTreeMap<String, String>, tensors: usize) -> Result<Vec<Stack>> {
    let Some(text) = metadata.get(STACKS_KEY) else { return Ok(vec![]) };
    let fault = |reason: String| Error::Format { path: path.to_owned(), reason };
    let raw: BTreeMap<String, RawStack> =
        serde_json::from_str(text).map_err(|error| fault(format!("metadata `{STACKS_KEY}`: {error}")))?;
    let stack = |(name, RawStack { shape, transposed })| {
        let elements = shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size));
        match elements {
            Some(1..) if shape[0] <= tensors => Ok(Stack { name, shape, is_transposed: transposed }),
            _ => Err(fault(format!("metadata `{STACKS_KEY}`: {} of shape {shape:?}", quoted(&name)))),
        }
    };
    raw.into_iter().map(stack).collect()
}

/// The transposes of `[rows, cols]` elements of so many bytes.
pub(super) fn transposed(bytes: &[u8], [rows, cols]: [usize; 2], size: usize) -> Result<Vec<u8>> {
    let mut out = memory::zeroed::<u8>(bytes.len())?;
    for (row, from) in bytes.chunks_exact((cols * size).max(1)).enumerate() {
        for (col, element) in from.chunks_exact(size.max(1)).enumerate() {
            out[(col * rows + row) * size..][..size].copy_from_slice(element);
        }
    }
    Ok(out)
}

/// A matrix of its own while its bytes arrive, whose transpose is written.
#[derive(Debug)]
pub(super) struct Gathering {
    shape: [usize; 2],
    size: usize,
    /// The bytes, and how many arrived.
    state: Mutex<(Vec<u8>, usize)>,
}

impl Gathering {
    /// Of the matrices of a stack, where they are written so.
    pub(super) fn of(stack: &Stack, dtype: StoredDType) -> Option<Self> {
        let size = dtype.bits() / 8;
        stack.is_transposed.then(|| Gathering { shape: stack.matrix_shape(), size, state: Mutex::default() })
    }

    /// Takes bytes from that one on. Returns the transpose when all are there.
    pub(super) fn put(&self, first: usize, bytes: &[u8]) -> Result<Option<Vec<u8>>> {
        let [rows, cols] = self.shape;
        let all = rows * cols * self.size;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (gathered, count) = &mut *state;
        if gathered.is_empty() {
            *gathered = memory::zeroed(all)?;
        }
        let Some(place) = gathered.get_mut(first..first.saturating_add(bytes.len())) else {
            return Err(Error::Length { what: "bytes to write", expected: all, found: first + bytes.len() });
        };
        place.copy_from_slice(bytes);
        *count += bytes.len();
        if *count < all {
            return Ok(None);
        }
        transposed(&std::mem::take(gathered), self.shape, self.size).map(Some)
    }
}

/// A matrix of a stored tensor.
#[derive(Debug)]
struct Place {
    stored: TensorInfo,
    number: usize,
    /// The rows and columns that are stored, where the matrix is their transpose.
    transposed: Option<[usize; 2]>,
}

/// A file some of whose tensors are taken apart.
#[derive(Debug)]
pub(super) struct Unstacked {
    source: Box<dyn Source>,
    tensors: Vec<TensorInfo>,
    metadata: BTreeMap<String, String>,
    /// By the matrix's name.
    places: HashMap<String, Place>,
    /// The last matrix that was transposed.
    last: Mutex<Option<(String, Arc<Vec<u8>>)>>,
}

impl Unstacked {
    /// The file with those tensors taken apart for which `choose` returns whether their matrices are `[in, out]`; but
    /// for one whose matrices would have a name of `taken`.
    pub(super) fn new(
        source: Box<dyn Source>,
        choose: &dyn Fn(&TensorInfo) -> Option<bool>,
        taken: &mut HashSet<String>,
    ) -> Result<Self> {
        let (mut tensors, mut places) = (vec![], HashMap::new());
        let mut stacks = parse(source.file().path(), source.metadata(), usize::MAX)?;
        for tensor in source.tensors() {
            let stack = match *tensor.shape {
                [1..=MOST, rows, cols] if rows > 0 && cols > 0 && tensor.dtype.element().is_some() => choose(tensor),
                _ => None,
            };
            let stack = stack.map(|is_transposed| {
                let shape = [tensor.shape[0], tensor.shape[1], tensor.shape[2]];
                Stack { name: tensor.name.clone(), shape, is_transposed }
            });
            let stack = stack.filter(|stack| !(0..stack.count()).any(|number| taken.contains(&stack.matrix(number))));
            let Some(stack) = stack else {
                tensors.push(tensor.clone());
                continue;
            };
            let [count, rows, cols] = stack.shape;
            for number in 0..count {
                let name = stack.matrix(number);
                let (shape, bytes) = (stack.matrix_shape().to_vec(), tensor.bytes / count);
                tensors.push(TensorInfo { name: name.clone(), shape, bytes, ..tensor.clone() });
                let transposed = stack.is_transposed.then_some([rows, cols]);
                taken.insert(name.clone());
                places.insert(name, Place { stored: tensor.clone(), number, transposed });
            }
            stacks.push(stack);
        }
        let mut metadata = source.metadata().clone();
        if !stacks.is_empty() {
            metadata.insert(STACKS_KEY.to_owned(), to_json(&stacks));
        }
        Ok(Unstacked { source, tensors, metadata, places, last: Mutex::default() })
    }

    /// The bytes of a matrix that is stored as its transpose.
    fn turned(&self, tensor: &TensorInfo, place: &Place, [rows, cols]: [usize; 2]) -> Result<Arc<Vec<u8>>> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, bytes)) = last.as_ref().filter(|(name, _)| *name == tensor.name) {
            return Ok(bytes.clone());
        }
        let mut stored = memory::zeroed::<u8>(tensor.bytes)?;
        self.source.read(&place.stored, place.number * tensor.bytes, &mut stored)?;
        let bytes = Arc::new(transposed(&stored, [rows, cols], tensor.bytes / (rows * cols))?);
        *last = Some((tensor.name.clone(), bytes.clone()));
        Ok(bytes)
    }
}

impl Source for Unstacked {
    fn file(&self) -> &FileBytes {
        self.source.file()
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn read(&self, tensor: &TensorInfo, first: usize, buffer: &mut [u8]) -> Result<()> {
        let Some(place) = self.places.get(&tensor.name) else { return self.source.read(tensor, first, buffer) };
        let Some(stored) = place.transposed else {
            return self.source.read(&place.stored, place.number * tensor.bytes + first, buffer);
        };
        let bytes = self.turned(tensor, place, stored)?;
        let (expected, found) = (bytes.len(), first.saturating_add(buffer.len()));
        let part = bytes.get(first..found).ok_or(Error::Length { what: "bytes to read", expected, found })?;
        buffer.copy_from_slice(part);
        Ok(())
    }

    fn in_memory(&self, tensor: &TensorInfo) -> Option<&[u8]> {
        match self.places.get(&tensor.name) {
            None => self.source.in_memory(tensor),
            Some(Place { transposed: Some(_), .. }) => None,
            Some(place) => {
                let first = place.number * tensor.bytes;
                self.source.in_memory(&place.stored)?.get(first..first + tensor.bytes)
            }
        }
    }

    fn below(&self) -> Option<&dyn Source> {
        Some(&*self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Selector,
        file::{Compress, Convert, Decompress, NotSparse, Overwrite, PlannedTensor, Reader, Unchanged, Writer},
    };

    /// Experts as gpt-oss stores them, and as Granite does, in which a whole matrix is one element.
    fn model(at: &Path) {
        let shapes: [(&str, &[usize]); 6] = [
            ("model.layers.0.mlp.router.weight", &[3, 10]),
            ("model.layers.0.mlp.experts.gate_up_proj", &[3, 10, 24]),
            ("model.layers.0.mlp.experts.gate_up_proj_bias", &[3, 24]),
            ("model.layers.0.mlp.experts.down_proj", &[3, 12, 10]),
            ("model.layers.1.block_sparse_moe.input_linear.weight", &[3, 24, 10]),
            ("model.layers.1.block_sparse_moe.output_linear.weight", &[3, 10, 12]),
        ];
        let plan: Vec<_> =
            shapes.iter().map(|(name, shape)| PlannedTensor::new(*name, StoredDType::F32, *shape)).collect();
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let mut writer = Writer::create(at, Overwrite::No, plan, metadata).unwrap();
        for (i, (name, shape)) in shapes.iter().enumerate() {
            let len: usize = shape.iter().product();
            let values: Vec<f32> = (0..len).map(|j| ((i * 7 + j) as f32 * 0.7).sin() + 2.0).collect();
            writer.write_elements(name, &values).unwrap();
        }
        writer.finish().unwrap();
    }

    #[test]
    fn matrices_of_a_tensor_have_names_and_are_found_by_them() {
        let stack = |name: &str| Stack { name: name.to_owned(), shape: [11, 4, 8], is_transposed: true };
        for (name, third) in
            [("a.experts.up", "a.experts.3.up.weight"), ("b.up.weight", "b.3.up.weight"), ("c", "3.c.weight")]
        {
            let stack = stack(name);
            assert_eq!(
                (stack.matrix(3), stack.number_of(third), stack.matrix_shape()),
                (third.to_owned(), Some(3), [8, 4])
            );
            for other in ["a.experts.03.up.weight", "a.experts.+3.up.weight", "a.experts.11.up.weight", name] {
                assert_eq!(stack.number_of(other), None);
            }
        }
    }

    #[test]
    fn a_model_whose_experts_are_taken_apart_is_put_together_again_byte_for_byte() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        model(&at("in"));
        crate::file::prune(at("in"), at("pruned"), Selector::TWO_FOUR).unwrap();
        let apart = || Reader::open(at("pruned")).unwrap().unstacked(|_| true).unwrap();
        let reader = apart();
        assert_eq!(reader.stacks().len(), 4);
        let whole = Reader::open(at("pruned")).unwrap();
        for stack in reader.stacks() {
            let [_, rows, cols] = stack.shape;
            let all = whole.tensor(&stack.name).unwrap().to_vec::<f32>().unwrap();
            for number in 0..stack.count() {
                let name = stack.matrix(number);
                let own = &all[number * rows * cols..][..rows * cols];
                let view = reader.tensor(&name).unwrap();
                let expected: Vec<f32> = match stack.is_transposed {
                    true => (0..cols).flat_map(|col| own.iter().skip(col).step_by(cols).copied()).collect(),
                    false => own.to_vec(),
                };
                assert_eq!(*view.elements::<f32>().unwrap(), expected, "{name}");
                assert_eq!(stack.number_of(&name), Some(number));
            }
        }
        Convert::new(apart()).run(at("unchanged"), Unchanged).unwrap();
        let which = |tensor: &TensorInfo| tensor.name.ends_with(".weight") && !tensor.name.contains("router");
        let compress = Compress { which: &which, ..Compress::default() };
        let report = Convert::new(apart()).run(at("small"), compress).unwrap();
        assert_eq!(report.changed().count(), 4 * 3);
        let small = Reader::open(at("small")).unwrap();
        assert_eq!((small.stacks(), small.compressed_weights().count()), (reader.stacks(), 12));
        Convert::new(small).run(at("dense"), Decompress).unwrap();
        let bytes = |name: &str| std::fs::read(at(name)).unwrap();
        assert!(bytes("unchanged") == bytes("pruned") && bytes("dense") == bytes("pruned"));
        // A model of which nothing is 2:4 is as it was.
        let keep = Compress { not_sparse: NotSparse::KeepDense, which: &which, ..Compress::default() };
        Convert::new(Reader::open(at("in")).unwrap().unstacked(|_| true).unwrap()).run(at("kept"), keep).unwrap();
        assert!(bytes("kept") == bytes("in"));
    }

    #[test]
    fn metadata_that_tell_no_tensors_are_an_error() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["[]", r#"{"a": {}}"#, r#"{"a": {"shape": [0, 1, 1], "transposed": true}}"#] {
            let huge = format!(r#"{{"a": {{"shape": [{}, 2, 1], "transposed": false}}}}"#, usize::MAX);
            for (i, text) in [text, &huge, r#"{"a": {"shape": [2, 1, 1], "transposed": false}}"#].iter().enumerate() {
                let path = folder.path().join(i.to_string());
                let plan = vec![PlannedTensor::new("b", StoredDType::F32, [1])];
                let mut writer = Writer::create(&path, Overwrite::Yes, plan, BTreeMap::new()).unwrap();
                writer.write_elements("b", &[1.0f32]).unwrap();
                writer.finish().unwrap();
                let file = std::fs::read(&path).unwrap();
                let metadata = serde_json::json!({ STACKS_KEY: text });
                let header =
                    format!(r#"{{"__metadata__":{metadata},"b":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
                let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
                bytes.extend(header.bytes());
                bytes.extend(&file[file.len() - 4..]);
                let error = Reader::from_bytes(&path, bytes).unwrap_err().to_string();
                assert!(error.contains(STACKS_KEY), "{error}");
            }
        }
    }
}
