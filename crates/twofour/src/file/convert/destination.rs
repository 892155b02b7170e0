//! Where a conversion writes: a file, or a directory of shards with their index.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::super::{
    DirectoryLock, Index, Overwrite, PACKED_README, Plan, Reader, Shard, Writer,
    naming::{self, INDEX_SUFFIX},
    temporary::is_temporary,
    unique::quoted,
    writer::{Output, Sealed, directory_of, expect_replaceable, sync_directory},
};
use super::{
    beside::Beside,
    description::{self, is_description},
    staging::Staging,
};
use crate::{Error, Result};

/// The output's place, found fit before any work is done.
#[derive(Debug)]
pub(super) struct Destination {
    path: PathBuf,
    overwrite: Overwrite,
    /// The output is a directory: of shards, or of one file and those beside it.
    is_directory: bool,
    /// The lock of the output's directory, where there is one already.
    lock: Option<DirectoryLock>,
}

impl Destination {
    /// Checks the output's place against the input's and the file system.
    pub(super) fn new(reader: &Reader, path: &Path, overwrite: Overwrite) -> Result<Self> {
        let fault = |reason: &str| Err(Error::Format { path: path.to_owned(), reason: reason.to_owned() });
        let parent = directory_of(path);
        let io = |source| Error::Io { path: parent.to_owned(), action: "looking for the output's directory", source };
        fs::metadata(parent).map_err(io)?;
        let exists = fs::symlink_metadata(path).is_ok();
        let names_file = path.extension().is_some_and(|e| e == "safetensors" || e == "json");
        let sharded_in = reader.index().map(|(index, _)| directory_of(index));
        let describes = !reader.described().is_empty() && !names_file;
        let whole = reader.directory().filter(|_| !names_file);
        let Some(source) = sharded_in.or(whole).or(describes.then(|| directory_of(reader.path()))) else {
            if path.is_dir() || path.as_os_str().to_string_lossy().ends_with(std::path::MAIN_SEPARATOR) {
                return fault("is a directory, but the input is a single file; name the file to write");
            }
            expect_replaceable(path, overwrite)?;
            return Ok(Destination { path: path.to_owned(), overwrite, is_directory: false, lock: None });
        };
        if names_file {
            return fault("names a file, but the input is sharded; name a directory to write");
        }
        if exists {
            if !path.is_dir() {
                let kind = if sharded_in.is_some() { "sharded" } else { "a directory" };
                return fault(&format!("is a file, but the input is {kind}; name a directory to write"));
            }
            let listing = |source| Error::Io { path: path.to_owned(), action: "listing the directory", source };
            let same = fs::canonicalize(path).map_err(listing)? == fs::canonicalize(source).map_err(listing)?;
            if same && !describes {
                return fault(
                    "is the input's own directory; a sharded model, or a directory, cannot be converted in place, name \
                     another",
                );
            }
            let lock = DirectoryLock::acquire(path)?;
            expect_place(reader, path, overwrite)?;
            return Ok(Destination { path: path.to_owned(), overwrite, is_directory: true, lock: Some(lock) });
        }
        Ok(Destination { path: path.to_owned(), overwrite, is_directory: true, lock: None })
    }

    /// An error where two shards would hold a tensor of the same name.
    pub(super) fn check(&self, plans: &[Plan]) -> Result<()> {
        let mut seen: HashMap<&str, usize> = HashMap::new();
        for (shard, plan) in plans.iter().enumerate() {
            let tensors = plan.tensors().iter().map(|t| t.name.as_str());
            for name in tensors.chain(plan.weights().iter().map(|w| w.name.as_str())) {
                if seen.insert(name, shard).is_some_and(|other| other != shard) {
                    let reason =
                        format!("two shards would hold a tensor named {}; rename or leave out one", quoted(name));
                    return Err(Error::Format { path: self.path.clone(), reason });
                }
            }
        }
        Ok(())
    }

    /// Makes the directory of an output of several files, where it is not there yet, and copies what is beside the
    /// tensors; `configuration` is the `quantization_config` of another tool, `watch` is asked now and then whether to
    /// go on.
    pub(super) fn open(
        self,
        reader: &Reader,
        plans: &[Plan],
        configuration: Option<Value>,
        watch: &mut dyn FnMut(&Path) -> Result<()>,
    ) -> Result<Opened> {
        let is_packed = self.is_directory && plans.iter().any(Plan::is_packed);
        let index = reader.index().map(|(path, index)| {
            let empty = Index { metadata: index.metadata.clone(), weight_map: BTreeMap::new() };
            (naming::named(&naming::in_safetensors(&file_name(path)), is_packed), empty)
        });
        let mut opened = Opened {
            sealed: Vec::new(),
            staging: None,
            destination: self,
            made: None,
            is_packed,
            index,
            names: Vec::new(),
            replaced: Vec::new(),
            total_bytes: 0,
        };
        if opened.destination.is_directory {
            let described = description::files(reader, plans, configuration)?;
            opened.stage(reader, described, watch)?;
            if !is_packed {
                opened.replaced.push(PACKED_README.to_owned());
            }
        }
        Ok(opened)
    }
}

/// An output whose files are being made.
#[derive(Debug)]
pub(super) struct Opened {
    // Dropped in this order: the files go before the lock of their directory, and that before the directory.
    sealed: Vec<Sealed>,
    staging: Option<Staging>,
    destination: Destination,
    made: Option<MadeDirectory>,
    /// Weights are packed, and files of weights are named so.
    is_packed: bool,
    /// The name of the index, and what it has so far.
    index: Option<(String, Index)>,
    /// The names of the sealed files, where the output is a directory.
    names: Vec<String>,
    /// Files that make place for the output: those of its weights in the other form.
    replaced: Vec<String>,
    total_bytes: u64,
}

/// A directory that goes with us unless the output is complete.
#[derive(Debug)]
struct MadeDirectory(PathBuf);

impl Drop for MadeDirectory {
    fn drop(&mut self) {
        // Best effort on the way out of another error; only an empty directory goes.
        let _ = fs::remove_dir(&self.0);
    }
}

impl Opened {
    /// Makes and locks the output's directory, and stages what it holds beside the tensors.
    fn stage(
        &mut self,
        reader: &Reader,
        described: Vec<(&'static str, Vec<u8>)>,
        watch: &mut dyn FnMut(&Path) -> Result<()>,
    ) -> Result<()> {
        let Destination { path, overwrite, lock, .. } = &mut self.destination;
        if lock.is_none() {
            match fs::create_dir(&*path) {
                Ok(()) => self.made = Some(MadeDirectory(path.clone())),
                // Another process was faster.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(source) => {
                    return Err(Error::Io { path: path.clone(), action: "making the output directory", source });
                }
            }
            *lock = Some(DirectoryLock::acquire(path)?);
            expect_place(reader, path, *overwrite)?;
        }
        let staging = self.staging.insert(Staging::begin(path, *overwrite)?);
        let Beside { directories, files, .. } = Beside::of(reader, path)?;
        // What a model has in place of its stored files.
        let own: Vec<(PathBuf, &[u8])> = reader.own_beside().filter(|(name, _)| !is_description(name)).collect();
        let mut made: HashSet<PathBuf> = HashSet::new();
        let of_own = own.iter().filter_map(|(name, _)| Some(name.parent()?.to_owned())).filter(|d| *d != Path::new(""));
        for directory in directories.into_iter().chain(of_own) {
            if made.insert(directory.clone()) {
                staging.directory(directory)?;
            }
        }
        let source = reader.directory().unwrap_or(Path::new(""));
        for file in files.into_iter().filter(|file| !own.iter().any(|(name, _)| name == file)) {
            staging.copy(&source.join(&file), file, watch)?;
        }
        for (name, contents) in &own {
            watch(name)?;
            staging.write(name.clone(), contents)?;
        }
        for name in reader.described().iter().filter(|name| !is_description(Path::new(name))) {
            watch(Path::new(name))?;
            if let Some(text) = reader.beside(name)? {
                staging.write(name.into(), &text)?;
            }
        }
        described.into_iter().try_for_each(|(name, text)| staging.write(name.into(), &text))
    }

    /// Begins the file that the input's shard turns into.
    pub(super) fn writer(&mut self, input: &Shard, plan: Plan, metadata: BTreeMap<String, String>) -> Result<Writer> {
        let path = if self.destination.is_directory {
            let name = naming::named(&input.output_name(), self.is_packed);
            self.replaced.push(naming::named(&name, !self.is_packed));
            if let Some((_, index)) = &mut self.index {
                for tensor in plan.tensors() {
                    index.weight_map.insert(tensor.name.clone(), name.clone());
                    self.total_bytes += tensor.dtype.bytes(&tensor.shape).unwrap_or(0) as u64;
                }
            }
            self.names.push(name.clone());
            self.destination.path.join(name)
        } else {
            self.destination.path.clone()
        };
        Writer::create(path, self.destination.overwrite, plan, metadata)
    }

    /// Brings a written file to the disk.
    pub(super) fn seal(&mut self, writer: Writer) -> Result<()> {
        self.sealed.push(writer.seal()?);
        Ok(())
    }

    /// Gives every file its name, the index last.
    pub(super) fn publish(mut self) -> Result<()> {
        if let Some((name, mut index)) = self.index.take() {
            index.metadata.insert("total_size".to_owned(), self.total_bytes.into());
            let path = self.destination.path.join(&name);
            self.sealed.push(Output::whole(&path, self.destination.overwrite, index.to_json().as_bytes())?);
            // From here to the end no index describes a mixture of old and new shards.
            self.replaced.extend([naming::named(&name, !self.is_packed), name.clone()]);
            self.names.push(name);
        }
        let Opened { sealed, mut staging, mut destination, made, names, replaced, .. } = self;
        let named = destination.name_all(sealed, staging.as_mut(), &names, &replaced);
        match (named, made) {
            (Ok(()), Some(made)) => std::mem::forget(made),
            (Ok(()), None) => {}
            (Err(error), made) => {
                // What has its name goes again, then the directory.
                drop((staging, destination, made));
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Destination {
    fn name_all(
        &mut self,
        sealed: Vec<Sealed>,
        staging: Option<&mut Staging>,
        names: &[String],
        replaced: &[String],
    ) -> Result<()> {
        let Some(lock) = &mut self.lock else { return sealed.into_iter().try_for_each(Sealed::publish) };
        // Into an empty directory: a kill between two names leaves what the next process may remove.
        if is_empty(&self.path)? {
            let staged = staging.as_ref().map(|staging| staging.paths().cloned()).into_iter().flatten();
            lock.announce(staged.chain(names.iter().map(PathBuf::from)).collect())?;
        }
        if self.overwrite == Overwrite::Yes {
            for name in replaced {
                let old = self.path.join(name);
                match fs::remove_file(&old) {
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    removed => {
                        removed.map_err(|source| Error::Io { path: old, action: "removing the old file", source })?;
                    }
                }
            }
            sync_directory(&self.path)?;
        }
        staging.map_or(Ok(()), Staging::publish)?;
        sealed.into_iter().try_for_each(Sealed::publish)?;
        lock.complete();
        Ok(())
    }
}

/// Whether a directory holds nothing but traces of outputs that are being written.
fn is_empty(directory: &Path) -> Result<bool> {
    let io = |source| Error::Io { path: directory.to_owned(), action: "listing the directory", source };
    for entry in fs::read_dir(directory).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        if !DirectoryLock::is_lock(&name) && !Staging::is_staging(&name) && !is_temporary(&name) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns an error where a directory is no place for an output: it holds anything, unless that may be overwritten, or
/// another model.
fn expect_place(reader: &Reader, output: &Path, overwrite: Overwrite) -> Result<()> {
    if overwrite == Overwrite::No && !is_empty(output)? {
        return Err(Error::Exists { path: output.to_owned() });
    }
    expect_no_other_model(reader, output)?;
    let beside = Beside::of(reader, output)?.files;
    beside.iter().try_for_each(|file| expect_replaceable(&output.join(file), overwrite))
}

/// Returns an error where a directory holds weights or an index that the output would leave there: readers might take
/// them for the output.
fn expect_no_other_model(reader: &Reader, output: &Path) -> Result<()> {
    let index = reader.index().map(|(path, _)| path);
    let index = index.map(|path| naming::in_safetensors(&file_name(path)));
    let names = reader.shards().iter().map(Shard::output_name).chain(index);
    let beside = Beside::of(reader, output)?.weights;
    let names = names.chain(beside.iter().map(|path| file_name(path)));
    let replaced: HashSet<String> =
        names.flat_map(|name| [naming::packed(&name), naming::ordinary(&name).to_owned()]).collect();
    let io = |source| Error::Io { path: output.to_owned(), action: "listing the directory", source };
    let mut others = Vec::new();
    for entry in fs::read_dir(output).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if replaced.contains(&name) {
            expect_replaceable(&output.join(name), Overwrite::Yes)?;
        } else if name.ends_with(".safetensors") || name.ends_with(INDEX_SUFFIX) {
            others.push(name);
        }
    }
    others.sort_unstable();
    let Some(first) = others.first() else { return Ok(()) };
    let more = if others.len() > 1 { format!(" and {} more", others.len() - 1) } else { String::new() };
    let reason = format!(
        "holds {first}{more}, of another model, which the output would not replace; remove what is there or name \
         another directory"
    );
    Err(Error::Format { path: output.to_owned(), reason })
}

/// The last component of a path that names a file.
fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
