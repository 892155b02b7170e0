//! Where a conversion writes: a file, or a directory of shards with their index.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use super::super::{
    Index, Overwrite, PACKED_README, Plan, Reader, Writer,
    naming::{self, INDEX_SUFFIX},
    unique::quoted,
    writer::{Output, Sealed, directory_of, expect_replaceable, sync_directory},
};
use super::{beside::Beside, description};
use crate::{Error, Result};

/// The output's place, found fit before any work is done.
#[derive(Debug)]
pub(super) struct Destination {
    path: PathBuf,
    overwrite: Overwrite,
    /// The output is a directory: of shards, or of one file and those beside it.
    is_directory: bool,
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
        let whole = reader.directory().filter(|_| !names_file);
        let Some(source) = sharded_in.or(whole) else {
            if path.is_dir() || path.as_os_str().to_string_lossy().ends_with(std::path::MAIN_SEPARATOR) {
                return fault("is a directory, but the input is a single file; name the file to write");
            }
            expect_replaceable(path, overwrite)?;
            return Ok(Destination { path: path.to_owned(), overwrite, is_directory: false });
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
            if same {
                return fault(
                    "is the input's own directory; a sharded model, or a directory, cannot be converted in place, name another",
                );
            }
            if overwrite == Overwrite::No && fs::read_dir(path).map_err(listing)?.next().is_some() {
                return Err(Error::Exists { path: path.to_owned() });
            }
            expect_no_other_model(reader, path)?;
        }
        Ok(Destination { path: path.to_owned(), overwrite, is_directory: true })
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

    /// Makes the directory of an output of several files, where it is not there yet, and writes what is beside the tensors.
    pub(super) fn open(self, reader: &Reader, plans: &[Plan]) -> Result<Opened> {
        let is_packed = self.is_directory && plans.iter().any(Plan::is_packed);
        let index = reader.index().map(|(path, index)| {
            let empty = Index { metadata: index.metadata.clone(), weight_map: BTreeMap::new() };
            (naming::named(&file_name(path), is_packed), empty)
        });
        let mut opened = Opened {
            destination: self,
            is_packed,
            index,
            replaced: Vec::new(),
            total_bytes: 0,
            sealed: Vec::new(),
            made: Vec::new(),
        };
        if opened.destination.is_directory {
            let described = description::files(reader, plans)?;
            opened.copy_beside(reader)?;
            for (name, text) in described {
                opened.seal_whole(name, &text)?;
            }
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
    destination: Destination,
    /// Weights are packed, and files of weights are named so.
    is_packed: bool,
    /// The name of the index, and what it has so far.
    index: Option<(String, Index)>,
    /// Files that make place for the output: those of its weights in the other form.
    replaced: Vec<String>,
    total_bytes: u64,
    // Dropped in this order: the files go before the directories that hold them, and a directory before the one that it is in.
    sealed: Vec<Sealed>,
    made: Vec<MadeDirectory>,
}

/// A directory that goes with us unless the output is complete.
#[derive(Debug)]
struct MadeDirectory(Option<PathBuf>);

impl Drop for MadeDirectory {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Best effort on the way out of another error; only an empty directory goes.
            let _ = fs::remove_dir(path);
        }
    }
}

impl Opened {
    /// Makes the output's directory and those inside it, and writes what the input has beside its tensors.
    fn copy_beside(&mut self, reader: &Reader) -> Result<()> {
        let Destination { path, overwrite, .. } = &self.destination;
        let (path, overwrite) = (path.clone(), *overwrite);
        self.make(path.clone())?;
        let beside = Beside::of(reader, &path)?;
        for directory in beside.directories {
            self.make(path.join(directory))?;
        }
        let source = reader.directory().unwrap_or(Path::new(""));
        for file in beside.files {
            let from = source.join(&file);
            let bytes = fs::read(&from).map_err(|source| Error::Io { path: from, action: "reading it", source })?;
            self.sealed.push(Output::whole(&path.join(file), overwrite, &bytes)?);
        }
        Ok(())
    }

    /// Writes the whole of a small file of the output's directory.
    fn seal_whole(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let Destination { path, overwrite, .. } = &self.destination;
        self.sealed.push(Output::whole(&path.join(name), *overwrite, bytes)?);
        Ok(())
    }

    /// Makes a directory, where it is not there yet.
    fn make(&mut self, path: PathBuf) -> Result<()> {
        match fs::create_dir(&path) {
            // The last one made is the first to go.
            Ok(()) => self.made.insert(0, MadeDirectory(Some(path))),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            Err(source) => return Err(Error::Io { path, action: "making the output directory", source }),
        }
        Ok(())
    }

    /// Begins the file that the input's shard turns into.
    pub(super) fn writer(&mut self, input: &Path, plan: Plan, metadata: BTreeMap<String, String>) -> Result<Writer> {
        let path = if self.destination.is_directory {
            let name = naming::named(&file_name(input), self.is_packed);
            self.replaced.push(naming::named(&name, !self.is_packed));
            if let Some((_, index)) = &mut self.index {
                for tensor in plan.tensors() {
                    index.weight_map.insert(tensor.name.clone(), name.clone());
                    self.total_bytes += tensor.dtype.bytes(&tensor.shape).unwrap_or(0) as u64;
                }
            }
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
            self.seal_whole(&name, index.to_json().as_bytes())?;
            // From here to the end no index describes a mixture of old and new shards.
            self.replaced.extend([naming::named(&name, !self.is_packed), name]);
        }
        let Destination { path, overwrite, is_directory } = &self.destination;
        if *is_directory && *overwrite == Overwrite::Yes {
            for name in &self.replaced {
                let old = path.join(name);
                match fs::remove_file(&old) {
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    removed => {
                        removed.map_err(|source| Error::Io { path: old, action: "removing the old file", source })?;
                    }
                }
            }
            sync_directory(path)?;
        }
        self.made.iter_mut().for_each(|made| made.0 = None);
        self.sealed.drain(..).try_for_each(Sealed::publish)
    }
}

/// Returns an error where a directory holds weights or an index that the output would leave there: readers might take them for the output.
fn expect_no_other_model(reader: &Reader, output: &Path) -> Result<()> {
    let index = reader.index().map(|(path, _)| path);
    let names = reader.shards().iter().map(|shard| shard.path()).chain(index).map(file_name);
    let replaced: HashSet<String> =
        names.flat_map(|name| [naming::packed(&name), naming::ordinary(&name).to_owned()]).collect();
    let io = |source| Error::Io { path: output.to_owned(), action: "listing the directory", source };
    let mut others = Vec::new();
    for entry in fs::read_dir(output).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if (name.ends_with(".safetensors") || name.ends_with(INDEX_SUFFIX)) && !replaced.contains(&name) {
            others.push(name);
        }
    }
    others.sort_unstable();
    let Some(first) = others.first() else { return Ok(()) };
    let more = if others.len() > 1 { format!(" and {} more", others.len() - 1) } else { String::new() };
    let reason = format!(
        "holds {first}{more}, of another model, which the output would not replace; remove what is there or name another directory"
    );
    Err(Error::Format { path: output.to_owned(), reason })
}

/// The last component of a path that names a file.
fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
