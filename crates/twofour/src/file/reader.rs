//! Reading a model: one file, or several with an index.

use std::{
    collections::{BTreeMap, HashMap, HashSet, btree_map::Entry},
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::Arc,
};

use half::f16;

use bytemuck::Pod;
use rayon::prelude::*;

use super::{
    CompressedInfo, Elements, FileBytes, Index, MAX_HEADER_BYTES, Part, Source, Stack, StoredDType, StoredElement,
    TensorInfo, ValueFormat,
    elements::Spare,
    find::find_in_directory,
    manifest,
    masked::{Masked, Masks},
    naming::in_safetensors,
    peer::{self, Translation},
    reordered::{Reorder, Reordered},
    source,
    stacked::{self, Unstacked},
    unique::quoted,
};
use crate::{
    Compressed, Element, Error, Result,
    int4::{Granularity, Int4},
    int8::Int8,
    memory,
    role::{Layout, Role, Roles},
};

/// Bytes that one thread reads at a time.
const PIECE: usize = 4 << 20;

/// A model on disk. Opening reads the headers; a tensor is read when its elements are asked for.
///
/// Everything the headers claim is checked when the model is opened; the metadata of a compressed weight, when that
/// weight is read. A file that is written to in place while it is open is an error of the next read. Replacing a file
/// by renaming another over it, as [`super::Writer`] does, is harmless.
#[derive(Debug)]
pub struct Reader {
    shards: Vec<Shard>,
    index: Option<(PathBuf, Index)>,
    /// The directory that was opened, where it was one.
    directory: Option<PathBuf>,
    metadata: BTreeMap<String, String>,
    /// What was found of other tools' formats, where the model was translated.
    translation: Translation,
    /// Shard and position in its header of each tensor.
    tensors: HashMap<String, (usize, usize)>,
    /// Shard and position in its list of each compressed weight.
    weights: HashMap<String, (usize, usize)>,
    /// The tensors whose matrices are tensors of their own.
    stacks: Vec<Stack>,
    /// The contents of files beside the weights that are not as they are stored.
    beside: BTreeMap<String, Vec<u8>>,
}

/// One file of a model.
#[derive(Debug)]
pub struct Shard {
    source: Box<dyn Source>,
    /// Memory of what was read last.
    spare: Spare,
    weights: Vec<CompressedInfo>,
    /// The names of the tensors that are parts of compressed weights.
    parts: HashSet<String>,
}

/// A tensor in a file.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// What the header says.
    pub info: &'a TensorInfo,
    shard: &'a Shard,
}

impl<'a> TensorView<'a> {
    /// Reads the elements' bytes, little-endian, row-major. Borrowed where the file's bytes are in memory
    /// ([`Reader::from_bytes`]).
    ///
    /// # Errors
    /// [`Error::Io`] where the system refuses, [`Error::Format`] where the file changed since it was opened.
    pub fn bytes(&self) -> Result<Elements<'a, u8>> {
        self.read()
    }

    /// Fills the buffer with the elements' bytes from that one on, on this thread.
    ///
    /// # Errors
    /// Those of [`TensorView::bytes`].
    pub(super) fn read_into(&self, first: usize, buffer: &mut [u8]) -> Result<()> {
        self.shard.source.read(self.info, first, buffer)
    }

    /// Reads the elements. Borrowed where the file's bytes are in memory and aligned for `T`.
    ///
    /// # Errors
    /// [`Error::WrongDType`] where the tensor holds another dtype, and those of [`TensorView::bytes`].
    pub fn elements<T: StoredElement>(&self) -> Result<Elements<'a, T>> {
        self.expect::<T>()?;
        self.read()
    }

    /// Reads the elements into a vector.
    ///
    /// # Errors
    /// Those of [`TensorView::elements`].
    pub fn to_vec<T: StoredElement>(&self) -> Result<Vec<T>> {
        self.expect::<T>()?;
        if let Some(bytes) = self.shard.source.in_memory(self.info) {
            return Ok(bytemuck::allocation::pod_collect_to_vec(bytes));
        }
        let mut elements: Vec<T> = memory::zeroed(self.info.bytes / size_of::<T>())?;
        self.fill(bytemuck::cast_slice_mut(&mut elements))?;
        Ok(elements)
    }

    fn read<T: Pod>(&self) -> Result<Elements<'a, T>> {
        if let Some(bytes) = self.shard.source.in_memory(self.info) {
            return Ok(Elements::of_bytes(bytes));
        }
        let mut buffer = self.shard.spare.take(self.info.bytes)?;
        self.fill(buffer.bytes_mut())?;
        Ok(Elements::of_buffer(buffer))
    }

    /// Fills a buffer of the tensor's length, by all threads.
    fn fill(&self, buffer: &mut [u8]) -> Result<()> {
        let pieces = buffer.par_chunks_mut(PIECE).enumerate();
        pieces.try_for_each(|(i, piece)| self.read_into(i * PIECE, piece))
    }

    fn expect<T: StoredElement>(&self) -> Result<()> {
        if self.info.dtype != T::STORED {
            let wrong = Error::WrongDType { expected: T::STORED, found: self.info.dtype };
            return Err(wrong.in_tensor(&self.info.name));
        }
        Ok(())
    }
}

impl Shard {
    fn new(source: Box<dyn Source>) -> Self {
        Shard { source, spare: Spare::default(), weights: Vec::new(), parts: HashSet::new() }
    }

    fn open(path: &Path) -> Result<Self> {
        Ok(Self::new(source::open(FileBytes::open(path)?)?))
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        self.source.file().path()
    }

    /// The name of a file in safetensors that has this one's place in another directory.
    pub(super) fn output_name(&self) -> String {
        in_safetensors(&self.path().file_name().unwrap_or_default().to_string_lossy())
    }

    /// The length of the file in bytes.
    pub fn file_bytes(&self) -> usize {
        self.source.file().length()
    }

    /// The file's metadata.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        self.source.metadata()
    }

    /// The file's tensors, in the order of their bytes.
    pub fn tensors(&self) -> &[TensorInfo] {
        self.source.tensors()
    }

    /// The compressed weights whose values this file holds, in order of name.
    pub fn compressed_weights(&self) -> &[CompressedInfo] {
        &self.weights
    }

    /// The tensors of this file that are no parts of compressed weights, in file order.
    pub fn plain_tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors().iter().filter(|t| !self.parts.contains(&t.name))
    }

    /// An error about this file.
    fn fault(&self, reason: String) -> Error {
        Error::Format { path: self.path().to_owned(), reason }
    }
}

impl Reader {
    /// Opens a model: a `.safetensors` or GGUF file or one of `torch.save`, an index (`*.index.json`), or a directory
    /// that holds safetensors or an index (the index wins, but over a file of its name that is not one of its shards;
    /// without one there must be exactly one `.safetensors` file, and not one of several shards).
    ///
    /// In a directory the names `model.safetensors` and `model.safetensors.index.json` win over others, as in
    /// transformers, and so do these names behind [`PACKED_PREFIX`](super::PACKED_PREFIX); both forms together are an
    /// error. Adapters (`adapter_model*`), weights in the format of a model's authors (`consolidated*`) and variants in
    /// another type (`model.fp16.safetensors`) are passed over where there is a model beside them. Of a directory
    /// without safetensors `pytorch_model.bin` is read, or its index.
    ///
    /// # Errors
    /// [`Error::Io`] where the system refuses, [`Error::Format`], [`Error::FormatVersion`] or [`Error::MissingShard`]
    /// where the files are not what they claim.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let directory = path.is_dir().then(|| path.to_owned());
        let found = if directory.is_some() { find_in_directory(path)? } else { path.to_owned() };
        let reader = if found.file_name().is_some_and(|name| name.to_string_lossy().ends_with(".index.json")) {
            Self::open_sharded(found)?
        } else {
            Self::new(vec![Shard::open(&found)?])?
        };
        Ok(Reader { directory, ..reader })
    }

    /// Reads a single file's bytes from memory; `path` is only named in errors.
    ///
    /// # Errors
    /// As [`Reader::open`], but for those of the system.
    pub fn from_bytes(path: impl AsRef<Path>, bytes: Vec<u8>) -> Result<Self> {
        Self::of(source::open(FileBytes::owned(path.as_ref(), bytes))?)
    }

    /// Reads a model from one source.
    ///
    /// # Errors
    /// Those of [`Reader::open`] about what a file claims.
    pub fn of(source: Box<dyn Source>) -> Result<Self> {
        Self::new(vec![Shard::new(source)])
    }

    /// The same model with other contents of a file beside its weights, such as `config.json`, or with a file of its
    /// own there. Its name is a path in the model's directory, in no folder within a folder.
    #[must_use]
    pub fn with_beside(mut self, name: impl Into<String>, contents: Vec<u8>) -> Self {
        self.beside.insert(name.into(), contents);
        self
    }

    /// The same model with some tensors in another order, or with some of their rows or columns alone, by name: as if
    /// they were stored so.
    ///
    /// # Errors
    /// [`Error::NoTensor`] for a name that no tensor has; [`Error::Length`] where an order does not fit its tensor;
    /// [`Error::WrongDType`] for a tensor that does not hold floats.
    pub fn reordered(mut self, orders: &HashMap<String, Reorder>) -> Result<Self> {
        for name in orders.keys() {
            let info = self.tensor(name)?.info;
            if info.dtype.element().is_none() {
                return Err(Error::WrongDType { expected: StoredDType::F32, found: info.dtype }.in_tensor(name));
            }
        }
        let shards = self.shards.into_iter();
        let reordered =
            shards.map(|shard| Ok(Shard { source: Box::new(Reordered::new(shard.source, orders)?), ..shard }));
        self.shards = reordered.collect::<Result<_>>()?;
        Ok(self)
    }

    /// The same model with the weights of other tools as this library has them: `sparse-24-bitmask`, `sparse-bitmask`,
    /// `marlin-24`, `pack-quantized`, `int-quantized` and `float-quantized` of compressed-tensors, and `marlin_24` of
    /// GPTQ.
    ///
    /// Integers with scales for rows or for 128 or 64 columns are such integers here where the weight is 2:4; other
    /// integers and 8-bit floats become the products with their scales, in the scales' type. A weight that is 2:4 is
    /// compressed, any other one dense. Where there is no such weight, the model stays as it is.
    ///
    /// Reads every such weight once. [`Reader::translation`] tells what was found.
    ///
    /// # Errors
    /// [`Error::Format`] for a weight that its format does not allow, or that has no form here, such as one with zero
    /// points.
    pub fn translated(self) -> Result<Self> {
        let Reader { shards, index, directory, beside, .. } = self;
        let (files, weights): (Vec<_>, Vec<_>) = shards.into_iter().map(|shard| (shard.source, shard.weights)).unzip();
        let (files, translation) = peer::translate(files, &weights)?;
        let reader = Self::new(files.into_iter().map(Shard::new).collect())?;
        Ok(Reader { index, directory, translation, beside, ..reader })
    }

    /// The same model with its weights multiplied by the masks of a file, as MaskLLM releases them: for a weight `w` a
    /// tensor `w.mask`, either of the weight's shape, of zeros and ones, or one-dimensional in U8 with a bit for each
    /// element of the flattened weight, the first in the highest bit (`numpy.packbits`). What a mask does not keep is
    /// +0.0.
    ///
    /// # Errors
    /// [`Error::Format`] for a mask without a weight, or of another shape. An element of a mask that is neither 0 nor 1
    /// is an error where it is read.
    pub fn masked(mut self, masks: Reader) -> Result<Self> {
        let masks = Arc::new(Masks::of(masks, &self)?);
        let masked = |shard: Shard| {
            let source = Box::new(Masked { source: shard.source, masks: masks.clone() });
            Shard { source, ..shard }
        };
        self.shards = self.shards.into_iter().map(masked).collect();
        Ok(self)
    }

    /// The same model with its experts in tensors of three dimensions taken apart, of those that `choose` returns true
    /// for: each is a matrix `[out, in]` of its own, as [`Stack`] names it. A conversion writes the matrices that it
    /// compresses under these names; those that it leaves dense, and those that are dense again, become one tensor.
    ///
    /// Nothing changes of a tensor where nothing tells how its matrices are stored ([`Roles::layout`]).
    ///
    /// # Errors
    /// Those of [`Roles::of_model`], and of [`Reader::open`] about what a file claims.
    pub fn unstacked(self, choose: impl Fn(&TensorInfo) -> bool) -> Result<Self> {
        let is_stack = |tensor: &TensorInfo| tensor.shape.len() == 3 && choose(tensor);
        if !self.plain_tensors().any(is_stack) {
            return Ok(self);
        }
        let roles = Roles::of_model(&self)?;
        let is_transposed = |tensor: &TensorInfo| {
            let is_chosen = is_stack(tensor) && roles.of(&tensor.name, &tensor.shape) == Role::StackedExperts;
            match roles.layout(&tensor.name, &tensor.shape).filter(|_| is_chosen)? {
                Layout::OutIn => Some(false),
                Layout::InOut => Some(true),
                Layout::Convolution => None,
            }
        };
        let mut taken: HashSet<String> = self.tensors.keys().chain(self.weights.keys()).cloned().collect();
        let Reader { shards, index, directory, translation, beside, .. } = self;
        let shards = shards
            .into_iter()
            .map(|shard| Ok(Shard::new(Box::new(Unstacked::new(shard.source, &is_transposed, &mut taken)?))));
        let reader = Self::new(shards.collect::<Result<_>>()?)?;
        Ok(Reader { index, directory, translation, beside, ..reader })
    }

    /// The tensors of three dimensions whose matrices are tensors of their own, or compressed weights.
    pub fn stacks(&self) -> &[Stack] {
        &self.stacks
    }

    /// What [`Reader::translated`] found.
    pub fn translation(&self) -> &Translation {
        &self.translation
    }

    fn open_sharded(path: PathBuf) -> Result<Self> {
        let io = |source| Error::Io { path: path.clone(), action: "reading the index", source };
        let length = fs::metadata(&path).map_err(io)?.len();
        if length > MAX_HEADER_BYTES as u64 {
            return Err(Error::Format { path, reason: format!("{length} bytes are too many for an index") });
        }
        let index = Index::parse(&path, &fs::read(&path).map_err(io)?)?;
        let directory = path.parent().unwrap_or(Path::new(""));
        let mut shards = Vec::new();
        for name in index.shards() {
            let shard = directory.join(name);
            if !shard.exists() {
                return Err(Error::MissingShard { index: path.clone(), shard });
            }
            shards.push(Shard::open(&shard)?);
        }
        for shard in &shards {
            let file = shard.path().file_name().unwrap_or_default().to_string_lossy();
            for tensor in shard.tensors() {
                if index.weight_map.get(&tensor.name).map(String::as_str) != Some(&*file) {
                    return Err(shard.fault(format!(
                        "tensor {} is in this shard, but the index {} does not place it here",
                        quoted(&tensor.name),
                        path.display()
                    )));
                }
            }
        }
        let reader = Self::new(shards)?;
        for (name, shard) in &index.weight_map {
            if !reader.tensors.contains_key(name) {
                return Err(Error::Format {
                    path,
                    reason: format!("tensor {} is placed in shard {}, which lacks it", quoted(name), quoted(shard)),
                });
            }
        }
        Ok(Reader { index: Some((path, index)), ..reader })
    }

    fn new(mut shards: Vec<Shard>) -> Result<Self> {
        let mut tensors = HashMap::new();
        let mut metadata = BTreeMap::new();
        for (s, shard) in shards.iter().enumerate() {
            for (t, tensor) in shard.tensors().iter().enumerate() {
                if tensors.insert(tensor.name.clone(), (s, t)).is_some() {
                    return Err(shard.fault(format!("tensor {} is in another shard too", quoted(&tensor.name))));
                }
            }
            for (name, value) in shard.metadata() {
                metadata.entry(name.clone()).or_insert_with(|| value.clone());
            }
        }
        for weight in listed(&shards)? {
            for (part, ..) in weight.parts() {
                let key = part.key(&weight.name);
                shards[tensors[&key].0].parts.insert(key);
            }
            let (home, _) = tensors[&Part::Values.key(&weight.name)];
            shards[home].weights.push(weight);
        }
        let mut stacks: Vec<Stack> = vec![];
        for shard in &shards {
            for stack in stacked::parse(shard.path(), shard.metadata(), tensors.len())? {
                match stacks.iter().find(|other| other.name == stack.name) {
                    None => stacks.push(stack),
                    Some(other) if *other == stack => {}
                    Some(_) => {
                        let name = quoted(&stack.name);
                        return Err(shard.fault(format!("tensor {name} has another description in another shard")));
                    }
                }
            }
        }
        let mut weights = HashMap::new();
        for (s, shard) in shards.iter().enumerate() {
            weights.extend(shard.weights.iter().enumerate().map(|(w, weight)| (weight.name.clone(), (s, w))));
        }
        Ok(Reader {
            shards,
            index: None,
            directory: None,
            metadata,
            translation: Translation::default(),
            tensors,
            weights,
            stacks,
            beside: BTreeMap::new(),
        })
    }

    /// The model's files, in order of name.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The index and its path, where the model is sharded.
    pub fn index(&self) -> Option<(&Path, &Index)> {
        self.index.as_ref().map(|(path, index)| (path.as_path(), index))
    }

    /// Whether all files are safetensors, the format that conversions write.
    pub fn is_safetensors(&self) -> bool {
        self.shards.iter().all(|shard| shard.source.is_safetensors())
    }

    /// The model's directory, where [`Reader::open`] was given one: the model is all of it then, configuration and
    /// tokenizer too.
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// The contents of a file beside the weights, such as `config.json`: what the file of weights tells itself, as GGUF
    /// does, or the file of that name in the model's directory, or beside the file that was opened.
    ///
    /// # Errors
    /// [`Error::Io`] where the system refuses, [`Error::Format`] where the file of weights tells what cannot be written
    /// so.
    pub fn beside(&self, name: &str) -> Result<Option<Vec<u8>>> {
        if let Some(contents) = self.beside.get(name) {
            return Ok(Some(contents.clone()));
        }
        if let Some(shard) = self.describing() {
            return if shard.source.described().contains(&name) { shard.source.describe(name) } else { Ok(None) };
        }
        let path = self.path_beside(name);
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound && path.symlink_metadata().is_err() => Ok(None),
            Err(source) => Err(Error::Io { path, action: "reading it", source }),
        }
    }

    /// The files of [`Reader::with_beside`].
    pub(super) fn own_beside(&self) -> impl Iterator<Item = (PathBuf, &[u8])> {
        self.beside.iter().map(|(name, contents)| (PathBuf::from(name), contents.as_slice()))
    }

    /// Where a file beside the weights is, or would be.
    pub fn path_beside(&self, name: &str) -> PathBuf {
        let parent = self.path().parent().filter(|parent| !parent.as_os_str().is_empty());
        self.directory().or(parent).unwrap_or(Path::new(".")).join(name)
    }

    /// The names of the files beside the weights that the file of weights tells itself.
    pub fn described(&self) -> &'static [&'static str] {
        self.describing().map_or(&[], |shard| shard.source.described())
    }

    fn describing(&self) -> Option<&Shard> {
        self.shards.iter().find(|shard| !shard.source.described().is_empty())
    }

    /// Every tensor that is stored, in file order; a compressed weight appears as its parts.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.shards.iter().flat_map(Shard::tensors)
    }

    /// Every tensor that is no part of a compressed weight, in file order.
    pub fn plain_tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.shards.iter().flat_map(Shard::plain_tensors)
    }

    /// The metadata of the file; of a sharded model, of all files together (the first file that has a name wins; the
    /// manifest of compressed weights is each file's own).
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// A stored tensor.
    ///
    /// # Errors
    /// [`Error::NoTensor`] where there is none of that name, [`Error::Format`] where the file changed since it was
    /// opened.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>> {
        let &(shard, at) = self.tensors.get(name).ok_or_else(|| self.no_tensor(name, "tensor"))?;
        let shard = &self.shards[shard];
        shard.source.file().expect_unchanged()?;
        Ok(TensorView { info: &shard.tensors()[at], shard })
    }

    /// Whether a tensor is a dense matrix of 8-bit integers with a scale for each row: of I8 `[rows, cols]`, beside
    /// which `<name>.scales` is F32 `[rows]`.
    pub fn is_dense_int8(&self, name: &str) -> bool {
        let info = |name: &str| self.tensors.get(name).map(|&(shard, at)| &self.shards[shard].tensors()[at]);
        match (info(name), info(&Part::Scales.key(name))) {
            (Some(values), Some(scales)) => is_dense_int8((values.dtype, &values.shape), (scales.dtype, &scales.shape)),
            _ => false,
        }
    }

    /// The first tensor by whose name weights are known that another tool packed, as compressed-tensors, GPTQ, AWQ and
    /// bitsandbytes do.
    pub fn foreign_packed(&self) -> Option<&TensorInfo> {
        const PARTS: [&str; 9] = [
            "qweight",
            "qzeros",
            "weight_packed",
            "weight_scale_inv",
            "quant_state",
            "W_q",
            "Qidxs",
            "bitmask",
            "B_24",
        ];
        self.tensors().find(|tensor| tensor.name.split('.').any(|part| PARTS.contains(&part)))
    }

    /// The compressed weights, in order of file, then of name.
    pub fn compressed_weights(&self) -> impl Iterator<Item = &CompressedInfo> {
        self.shards.iter().flat_map(|s| &s.weights)
    }

    /// What the file says about one compressed weight.
    ///
    /// # Errors
    /// [`Error::NoTensor`] where no compressed weight has that name.
    pub fn compressed_info(&self, name: &str) -> Result<&CompressedInfo> {
        let &(shard, at) = self.weights.get(name).ok_or_else(|| self.no_tensor(name, "compressed weight"))?;
        Ok(&self.shards[shard].weights[at])
    }

    /// A compressed weight, after checking every rule of the canonical form.
    ///
    /// # Errors
    /// [`Error::NoTensor`] where no compressed weight has that name, [`Error::WrongDType`] where it is of another dtype
    /// than `T`, and those of [`Compressed::from_parts`], with file and tensor, where it is damaged.
    pub fn compressed<T: Element>(&self, name: &str) -> Result<Compressed<T>> {
        let info = self.compressed_info(name)?;
        let values = self.tensor(&Part::Values.key(name))?.to_vec::<T>()?;
        let meta = self.tensor(&Part::Meta.key(name))?.to_vec::<u32>()?;
        Compressed::from_parts(info.rows, info.cols, values, meta)
            .map_err(|e| e.in_tensor(name).in_file(self.path_of(name)))
    }

    /// A compressed weight of 4-bit integers, after checking every rule of the canonical form.
    ///
    /// # Errors
    /// [`Error::NoTensor`] where no compressed weight has that name, [`Error::NotInt4`] where its values are others,
    /// and those of [`Int4::from_packed`], with file and tensor, where it is damaged.
    pub fn int4(&self, name: &str) -> Result<Int4> {
        let info = self.compressed_info(name)?;
        let named = |e: Error| e.in_tensor(name).in_file(self.path_of(name));
        let ValueFormat::Int4(granularity) = info.format else {
            return Err(named(Error::NotInt4 { found: info.format.name() }));
        };
        let values = self.tensor(&Part::Values.key(name))?.bytes()?;
        let meta = self.tensor(&Part::Meta.key(name))?.to_vec::<u32>()?;
        let scales = self.tensor(&Part::Scales.key(name))?.to_vec::<f16>()?;
        Int4::from_packed(info.rows, info.cols, &values, meta, scales, granularity).map_err(named)
    }

    /// A compressed weight of 8-bit integers with its scales, after checking every rule of the canonical form.
    ///
    /// # Errors
    /// [`Error::NoTensor`] where no compressed weight has that name, [`Error::NotInt8`] where its values are others or
    /// have no scales, and those of [`Int8::from_parts`], with file and tensor, where it is damaged.
    pub fn int8(&self, name: &str) -> Result<Int8> {
        let info = self.compressed_info(name)?;
        let named = |e: Error| e.in_tensor(name).in_file(self.path_of(name));
        let view = self.tensor(&Part::Values.key(name))?;
        let scales = Part::Scales.key(name);
        let (scales, granularity) = match info.format {
            ValueFormat::ScaledI8 => (self.tensor(&scales)?.to_vec::<f32>()?, Granularity::Row),
            ValueFormat::GroupedI8(granularity) => {
                (self.tensor(&scales)?.elements::<f16>()?.iter().map(|scale| scale.to_f32()).collect(), granularity)
            }
            other => return Err(named(Error::NotInt8 { found: other.name() })),
        };
        let meta = self.tensor(&Part::Meta.key(name))?.to_vec::<u32>()?;
        let weight = Compressed::from_parts(info.rows, info.cols, view.to_vec::<i8>()?, meta).map_err(named)?;
        Int8::from_parts(weight, scales, granularity).map_err(named)
    }

    /// The scales of the rows of a compressed weight of 8-bit integers, where it has them.
    ///
    /// # Errors
    /// As [`Reader::tensor`].
    pub fn scales(&self, name: &str) -> Result<Option<Vec<f32>>> {
        if self.compressed_info(name)?.format != ValueFormat::ScaledI8 {
            return Ok(None);
        }
        Ok(Some(self.tensor(&Part::Scales.key(name))?.to_vec::<f32>()?))
    }

    /// The file that holds a tensor or compressed weight; the first one where there is none of that name.
    pub(super) fn path_of(&self, name: &str) -> &Path {
        let place = self.tensors.get(name).or_else(|| self.weights.get(name));
        let shard = place.map_or(0, |&(shard, _)| shard);
        self.shards.get(shard).map_or(Path::new(""), Shard::path)
    }

    /// Where the model was found: the index, or the one file.
    pub fn path(&self) -> &Path {
        match &self.index {
            Some((path, _)) => path,
            None => self.shards.first().map_or(Path::new(""), Shard::path),
        }
    }

    fn no_tensor(&self, name: &str, what: &'static str) -> Error {
        let hint = match what {
            "tensor" if self.weights.contains_key(name) => "it is stored compressed".to_owned(),
            "tensor" => format!("it holds {} tensors", self.tensors.len()),
            _ if self.tensors.contains_key(name) => "it is stored dense".to_owned(),
            _ => format!("it holds {} compressed weights", self.weights.len()),
        };
        Error::NoTensor { path: self.path().to_owned(), what, name: name.to_owned(), hint }
    }
}

/// Whether a tensor and the one of its scales are a dense matrix of 8-bit integers with a scale for each row.
pub(super) fn is_dense_int8(values: (StoredDType, &[usize]), scales: (StoredDType, &[usize])) -> bool {
    values.0 == StoredDType::I8 && values.1.len() == 2 && scales.0 == StoredDType::F32 && scales.1 == &values.1[..1]
}

/// The compressed weights that the files' manifests list, in order of name, each once. A manifest may list weights of
/// other files, too: transformers writes the same one into every shard.
fn listed(shards: &[Shard]) -> Result<impl Iterator<Item = CompressedInfo> + use<>> {
    let tensors = shards.iter().flat_map(Shard::tensors).map(|t| (t.name.as_str(), t)).collect();
    let mut weights = BTreeMap::new();
    for shard in shards {
        for weight in manifest::parse(shard.path(), shard.metadata(), &tensors)? {
            match weights.entry(weight.name.clone()) {
                Entry::Vacant(entry) => _ = entry.insert(weight),
                Entry::Occupied(entry) if *entry.get() == weight => {}
                Entry::Occupied(_) => {
                    let name = quoted(&weight.name);
                    return Err(shard.fault(format!("weight {name} has another description in another shard")));
                }
            }
        }
    }
    Ok(weights.into_values())
}
