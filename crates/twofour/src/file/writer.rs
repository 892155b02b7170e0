//! Writing a file: all of it or nothing.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};

use super::{
    CompressedInfo, MANIFEST_KEY, MAX_HEADER_BYTES, Part, Plan, PlannedTensor, STACKS_KEY, StoredDType, StoredElement,
    header::METADATA,
    manifest,
    stacked::{self, Gathering},
    temporary::Temporary,
};
use crate::{
    Compressed, Element, Error, Result,
    int4::{Granularity, Int4},
    int8::Int8,
};

use half::f16;

/// The data begins at a multiple of this many bytes, a cache line.
const DATA_ALIGNMENT: usize = 64;

/// Whether an existing output may be replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Overwrite {
    /// An existing output is an error.
    #[default]
    No,
    /// An existing output is replaced, at the very end and in one step.
    Yes,
}

/// A safetensors file in the making.
///
/// The bytes go to a temporary file on the same file system, without a name where the system has such files.
/// [`Writer::finish`] brings it to the disk and gives it its name in one step; a writer that is dropped before leaves
/// nothing. Tensors are written one at a time, in any order.
///
/// ```
/// use std::collections::BTreeMap;
/// use twofour::file::{Overwrite, PlannedTensor, Reader, StoredDType, Writer};
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("model.safetensors");
/// let plan = vec![PlannedTensor::new("bias", StoredDType::F32, [2])];
/// let mut writer = Writer::create(&path, Overwrite::No, plan, BTreeMap::new())?;
/// writer.write_elements("bias", &[1.0f32, 2.0])?;
/// writer.finish()?;
/// assert_eq!(*Reader::open(&path)?.tensor("bias")?.elements::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Writer {
    output: Output,
    slots: HashMap<String, Slot>,
}

#[derive(Debug)]
struct Slot {
    dtype: StoredDType,
    start: u64,
    bytes: usize,
    written: bool,
    /// What is written is the transpose.
    gathering: Option<Gathering>,
}

impl Writer {
    /// Begins a file: creates the temporary file and writes the header. Temporary files that killed processes left in
    /// the same directory are removed.
    ///
    /// Tensors are laid out in descending order of element size, then by name, and the data begins at a multiple of 64
    /// bytes; so every tensor of whole-byte elements is aligned for its dtype in a mapped file. The manifest of the
    /// plan's compressed weights goes into the metadata under `twofour`, in the place of one that is there already.
    ///
    /// # Errors
    /// [`Error::Exists`] where there is an output already and `overwrite` does not allow to replace it;
    /// [`Error::Format`] where `path` is a symbolic link or a device, or two tensors would have the same name or one is
    /// too large; [`Error::Io`] where the system refuses.
    pub fn create(
        path: impl AsRef<Path>,
        overwrite: Overwrite,
        plan: impl Into<Plan>,
        mut metadata: BTreeMap<String, String>,
    ) -> Result<Writer> {
        let (path, plan) = (path.as_ref(), plan.into());
        let sizes = plan.check(path)?;
        metadata.remove(MANIFEST_KEY);
        if !plan.weights().is_empty() {
            let mut weights: Vec<_> = plan.weights().iter().collect();
            weights.sort_by(|a, b| a.name.cmp(&b.name));
            metadata.insert(MANIFEST_KEY.to_owned(), manifest::to_json(weights));
        }
        metadata.remove(STACKS_KEY);
        if !plan.apart().is_empty() {
            metadata.insert(STACKS_KEY.to_owned(), stacked::to_json(plan.apart()));
        }
        let mut order: Vec<(&PlannedTensor, usize)> = plan.tensors().iter().zip(sizes).collect();
        order.sort_by(|(a, _), (b, _)| b.dtype.bits().cmp(&a.dtype.bits()).then_with(|| a.name.cmp(&b.name)));
        let header = header_text(&order, &metadata);
        if header.len() > MAX_HEADER_BYTES {
            let reason = format!("its header would take {} bytes, {MAX_HEADER_BYTES} are allowed", header.len());
            return Err(Error::Format { path: path.to_owned(), reason });
        }
        let mut output = Output::create(path, overwrite)?;
        output.append(&(header.len() as u64).to_le_bytes())?;
        output.append(header.as_bytes())?;
        let mut start = 8 + header.len() as u64;
        let mut slots = HashMap::new();
        for (tensor, bytes) in order {
            let mut add = |name: String, bytes: usize, gathering: Option<Gathering>| {
                slots.insert(name, Slot { dtype: tensor.dtype, start, bytes, written: false, gathering });
                start += bytes as u64;
            };
            match plan.stack(&tensor.name) {
                None => add(tensor.name.clone(), bytes, None),
                Some(stack) => (0..stack.count()).for_each(|number| {
                    add(stack.matrix(number), bytes / stack.count(), Gathering::of(stack, tensor.dtype));
                }),
            }
        }
        Ok(Writer { output, slots })
    }

    /// Writes the little-endian, row-major bytes of one tensor.
    ///
    /// # Errors
    /// [`Error::NotPlanned`] where the tensor is not planned or is written already, [`Error::Length`] where it has
    /// another length than planned, [`Error::Io`] where the system refuses.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.in_pieces(name, bytes.len())?.write_at(0, bytes)
    }

    /// The place of a tensor of so many bytes, which is written in pieces: all of them, in any order, by any threads.
    ///
    /// # Errors
    /// Those of [`Writer::write`], but for the system's.
    pub(super) fn in_pieces(&mut self, name: &str, bytes: usize) -> Result<TensorPlace<'_>> {
        let refused = |reason| Err(Error::NotPlanned { path: self.output.path.clone(), name: name.to_owned(), reason });
        let Some(slot) = self.slots.get_mut(name) else { return refused("is not among the planned tensors") };
        if slot.written {
            return refused("was written already");
        }
        if bytes != slot.bytes {
            let wrong = Error::Length { what: "bytes to write", expected: slot.bytes, found: bytes };
            return Err(wrong.in_tensor(name));
        }
        slot.written = true;
        Ok(TensorPlace { output: &self.output, start: slot.start, gathering: slot.gathering.as_ref() })
    }

    /// The place of a compressed weight, whose parts are written some rows at a time.
    ///
    /// # Errors
    /// Those of [`Writer::in_pieces`].
    pub(super) fn rows_of(&mut self, weight: &CompressedInfo) -> Result<RowsPlace<'_>> {
        let mut starts = Vec::new();
        for (part, dtype, shape) in weight.parts() {
            let bytes = dtype.bytes(&shape).unwrap_or_default();
            let place = self.in_pieces(&part.key(&weight.name), bytes)?;
            starts.push((place.start, bytes / weight.rows));
        }
        let places =
            starts.into_iter().map(|(start, row)| (TensorPlace { output: &self.output, start, gathering: None }, row));
        Ok(RowsPlace { parts: places.collect() })
    }

    /// Writes the elements of one tensor.
    ///
    /// # Errors
    /// [`Error::WrongDType`] where another dtype was planned, and those of [`Writer::write`].
    pub fn write_elements<T: StoredElement>(&mut self, name: &str, elements: &[T]) -> Result<()> {
        match self.slots.get(name) {
            Some(slot) if slot.dtype != T::STORED => {
                Err(Error::WrongDType { expected: slot.dtype, found: T::STORED }.in_tensor(name))
            }
            _ => self.write(name, bytemuck::cast_slice(elements)),
        }
    }

    /// Writes values and metadata of a compressed weight.
    ///
    /// # Errors
    /// As [`Writer::write_elements`].
    pub fn write_compressed<T: Element>(&mut self, name: &str, weight: &Compressed<T>) -> Result<()> {
        self.write_elements(&Part::Values.key(name), weight.values())?;
        self.write_elements(&Part::Meta.key(name), weight.meta())
    }

    /// Writes values, metadata and scales of a compressed weight of 4-bit integers.
    ///
    /// # Errors
    /// As [`Writer::write_elements`].
    pub fn write_int4(&mut self, name: &str, weight: &Int4) -> Result<()> {
        self.write_elements(&Part::Values.key(name), &weight.packed_values())?;
        self.write_elements(&Part::Meta.key(name), weight.weight().meta())?;
        self.write_elements(&Part::Scales.key(name), weight.scales())
    }

    /// Writes values, metadata and scales of a compressed weight of 8-bit integers.
    ///
    /// # Errors
    /// As [`Writer::write_elements`].
    pub fn write_int8(&mut self, name: &str, weight: &Int8) -> Result<()> {
        self.write_compressed(name, weight.weight())?;
        let scales = Part::Scales.key(name);
        if weight.granularity() == Granularity::Row {
            return self.write_elements(&scales, weight.scales());
        }
        let halves: Vec<f16> = weight.scales().iter().map(|scale| f16::from_f32(*scale)).collect();
        self.write_elements(&scales, &halves)
    }

    /// Brings the file to the disk and gives it its name.
    ///
    /// # Errors
    /// [`Error::NotPlanned`] where a planned tensor was not written, [`Error::Exists`] where an output appeared
    /// meanwhile, [`Error::Io`] where the system refuses. Nothing is left then.
    pub fn finish(self) -> Result<()> {
        self.seal()?.publish()
    }

    /// Brings the file to the disk; it does not have its name yet.
    pub(super) fn seal(self) -> Result<Sealed> {
        let mut missing: Vec<&str> =
            self.slots.iter().filter(|(_, slot)| !slot.written && slot.bytes > 0).map(|(n, _)| n.as_str()).collect();
        missing.sort_unstable();
        if let Some(name) = missing.first() {
            let reason = "was planned and never written";
            return Err(Error::NotPlanned { path: self.output.path.clone(), name: (*name).to_owned(), reason });
        }
        self.output.seal()
    }
}

/// Where a tensor lies in a file that is being written.
#[derive(Debug, Clone, Copy)]
pub(super) struct TensorPlace<'a> {
    output: &'a Output,
    start: u64,
    gathering: Option<&'a Gathering>,
}

impl TensorPlace<'_> {
    /// Writes the tensor's bytes from that one on.
    ///
    /// # Errors
    /// [`Error::Io`] where the system refuses.
    pub(super) fn write_at(&self, first: usize, bytes: &[u8]) -> Result<()> {
        let Some(gathering) = self.gathering else { return self.output.write_at(self.start + first as u64, bytes) };
        match gathering.put(first, bytes)? {
            Some(transposed) => self.output.write_at(self.start, &transposed),
            None => Ok(()),
        }
    }
}

/// Where the parts of a compressed weight lie in a file that is being written.
#[derive(Debug)]
pub(super) struct RowsPlace<'a> {
    /// Each with the bytes of a row.
    parts: Vec<(TensorPlace<'a>, usize)>,
}

impl RowsPlace<'_> {
    /// Writes the bytes of each part from that row of the weight on.
    ///
    /// # Errors
    /// [`Error::Io`] where the system refuses.
    pub(super) fn write(&self, first_row: usize, parts: &[&[u8]]) -> Result<()> {
        self.parts.iter().zip(parts).try_for_each(|((place, row), bytes)| place.write_at(first_row * row, bytes))
    }
}

/// The header's JSON, padded with spaces so that the data is aligned.
fn header_text(order: &[(&PlannedTensor, usize)], metadata: &BTreeMap<String, String>) -> String {
    let mut header = Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA.to_owned(), json!(metadata));
    }
    let mut start = 0;
    for (tensor, bytes) in order {
        let entry = json!({
            "dtype": tensor.dtype.name(),
            "shape": tensor.shape,
            "data_offsets": [start, start + bytes],
        });
        header.insert(tensor.name.clone(), entry);
        start += bytes;
    }
    let mut text = Value::Object(header).to_string();
    let padded = (8 + text.len()).next_multiple_of(DATA_ALIGNMENT) - 8;
    text.extend(std::iter::repeat_n(' ', padded - text.len()));
    text
}

/// A file that is being written.
#[derive(Debug)]
pub(super) struct Output {
    path: PathBuf,
    overwrite: Overwrite,
    temp: Temporary,
}

impl Output {
    /// Begins a file beside its final place.
    pub(super) fn create(path: &Path, overwrite: Overwrite) -> Result<Self> {
        let usable = path.file_name().is_some() && !path.is_dir();
        if !usable {
            let reason = "is a directory; name the file to write".to_owned();
            return Err(Error::Format { path: path.to_owned(), reason });
        }
        expect_replaceable(path, overwrite)?;
        let directory = directory_of(path);
        let temp = Temporary::create_in(directory).map_err(|source| Error::Io {
            path: directory.to_owned(),
            action: "creating a temporary file there",
            // tempfile adds the temporary path to the message; the kind says it all.
            source: source.raw_os_error().map_or(source, io::Error::from_raw_os_error),
        })?;
        Ok(Output { path: path.to_owned(), overwrite, temp })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.temp.file().write_all(bytes).map_err(|e| self.refused("writing", e))
    }

    fn write_at(&self, start: u64, bytes: &[u8]) -> Result<()> {
        write_at(self.temp.as_file(), bytes, start).map_err(|e| self.refused("writing", e))
    }

    /// Writes the whole of a small file.
    pub(super) fn whole(path: &Path, overwrite: Overwrite, bytes: &[u8]) -> Result<Sealed> {
        let mut output = Output::create(path, overwrite)?;
        output.append(bytes)?;
        output.seal()
    }

    fn seal(mut self) -> Result<Sealed> {
        self.temp.file().sync_all().map_err(|e| self.refused("bringing it to the disk", e))?;
        Ok(Sealed { path: self.path, overwrite: self.overwrite, temp: self.temp })
    }

    fn refused(&self, action: &'static str, source: io::Error) -> Error {
        Error::Io { path: self.path.clone(), action, source }
    }
}

/// Writes the bytes to the file from `offset` on.
#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Writes the bytes to the file from `offset` on.
#[cfg(windows)]
fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                bytes = &bytes[written..];
                offset += written as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// A file that is complete and on the disk, and does not have its name yet; dropping it removes it.
#[derive(Debug)]
pub(super) struct Sealed {
    path: PathBuf,
    overwrite: Overwrite,
    temp: Temporary,
}

impl Sealed {
    /// Gives the file its name.
    pub(super) fn publish(self) -> Result<()> {
        match self.temp.publish(&self.path, self.overwrite) {
            Ok(()) => sync_directory(directory_of(&self.path)),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(Error::Exists { path: self.path }),
            Err(e) => Err(Error::Io { path: self.path, action: "giving it its name", source: e }),
        }
    }
}

/// Writes the whole of a small file: it has all of its new contents at once, also after a kill, or is as it was.
///
/// # Errors
/// Those of [`expect_replaceable`]; [`Error::Format`] for a directory; [`Error::Io`] where the system refuses.
///
/// ```
/// use twofour::file::{Overwrite, write_whole};
/// let directory = tempfile::tempdir()?;
/// let path = directory.path().join("report.json");
/// write_whole(&path, Overwrite::No, b"{}")?;
/// assert_eq!(std::fs::read(&path)?, b"{}");
/// assert!(write_whole(&path, Overwrite::No, b"[]").is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write_whole(path: impl AsRef<Path>, overwrite: Overwrite, contents: &[u8]) -> Result<()> {
    Output::whole(path.as_ref(), overwrite, contents)?.publish()
}

/// Checks that a file may get its name there: nothing is there, or a file that `overwrite` allows to replace.
///
/// # Errors
/// [`Error::Format`] for what is no file, whatever `overwrite` says: a device would become a file, and of a symbolic
/// link either it or what it leads to would be lost. [`Error::Exists`] for a file that may not be replaced.
pub fn expect_replaceable(path: &Path, overwrite: Overwrite) -> Result<()> {
    // symlink_metadata: a dangling link is there, too.
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    if found.is_file() {
        return match overwrite {
            Overwrite::No => Err(Error::Exists { path: path.to_owned() }),
            Overwrite::Yes => Ok(()),
        };
    }
    let reason = match fs::read_link(path) {
        Err(_) if found.is_dir() => "is a directory, and is not replaced by a file; name another output".to_owned(),
        Ok(target) => format!(
            "is a symbolic link to {}, and links are not replaced; name the file itself, or remove the link",
            target.display()
        ),
        Err(_) => "is no file but a device, a pipe or a socket, and is not replaced; name another output".to_owned(),
    };
    Err(Error::Format { path: path.to_owned(), reason })
}

/// The directory that holds the path's last component.
pub(super) fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Brings a directory's entries to the disk, where the system can.
pub(super) fn sync_directory(directory: &Path) -> Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(directory).and_then(|d| d.sync_all()) {
        // Some network file systems cannot; the rename has happened all the same.
        Err(e) if !matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
            Err(Error::Io { path: directory.to_owned(), action: "bringing the directory to the disk", source: e })
        }
        _ => Ok(()),
    }
}
