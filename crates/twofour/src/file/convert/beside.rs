//! The files of a model's directory beside its tensors: configuration, tokenizer, licence, the weights of other
//! modules.

use std::{
    collections::HashSet,
    ffi::OsStr,
    fs::{self, FileType},
    path::{Path, PathBuf},
};

use super::{
    super::{
        Reader,
        naming::{self, INDEX_SUFFIX, Kind},
    },
    description::is_description,
};
use crate::{Error, Result};

/// What a model's directory holds beside the model's own weights, and what a conversion to another directory does with
/// it. All paths are relative to the directory.
///
/// Nothing is lost in silence: what is not copied is in the list of what is left out, but for files that the conversion
/// writes anew.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Beside {
    /// Directories, each before what it holds.
    pub directories: Vec<PathBuf>,
    /// Files that are copied byte for byte.
    pub files: Vec<PathBuf>,
    /// Those among the files that hold weights: of other modules in directories of their own, or of adapters.
    pub weights: Vec<PathBuf>,
    /// Files and directories that are not copied, and why.
    pub left_out: Vec<LeftOut>,
}

/// A file or directory that a conversion does not copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// Its path in the model's directory.
    pub path: PathBuf,
    /// Why.
    pub reason: &'static str,
}

/// What becomes of a file or directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Copied,
    /// Copied, and said so: a user may have expected it to be converted.
    CopiedWeights,
    LeftOut(&'static str),
    /// The conversion writes it.
    Written,
}

impl Beside {
    /// What is beside the tensors of a model that was opened as a directory; nothing where it was opened as a file or
    /// an index. The directory `output` is passed over, where it is inside.
    ///
    /// Copied are all files and directories, in subdirectories too, with these exceptions: what is hidden; the model's
    /// weights in other formats or types, which would be those of the input; states of training (`checkpoint-500/`,
    /// `global_step500/`), and of the folder of `twofour train` all that is of the run; links to directories, and what
    /// is no regular file. In subdirectories weights in formats of PyTorch belong to other modules and are copied.
    /// Links to files are followed, as in the hub's cache.
    ///
    /// # Errors
    /// A directory that cannot be listed, a link that leads nowhere.
    pub fn of(reader: &Reader, output: &Path) -> Result<Self> {
        let mut found = Self::default();
        if let Some(directory) = reader.directory() {
            let index = reader.index().map(|(path, _)| path);
            let own = reader.shards().iter().map(|shard| shard.path()).chain(index);
            let own = own.filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned())).collect();
            let output = fs::canonicalize(output).ok();
            found.walk(directory, Path::new(""), &own, output.as_deref())?;
        }
        Ok(found)
    }

    fn walk(&mut self, top: &Path, inside: &Path, own: &HashSet<String>, output: Option<&Path>) -> Result<()> {
        let directory = top.join(inside);
        let io = |source| Error::Io { path: directory.clone(), action: "listing the directory", source };
        let mut entries = Vec::new();
        for entry in fs::read_dir(&directory).map_err(io)? {
            let entry = entry.map_err(io)?;
            entries.push((entry.file_name(), entry.file_type().map_err(io)?));
        }
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        let all: Vec<String> = entries.iter().map(|(name, _)| name.to_string_lossy().into_owned()).collect();
        let is_top = inside.as_os_str().is_empty();
        let is_run = is_top && RUN_MARKS.iter().all(|mark| all.iter().any(|name| name == mark));
        for ((name, kind), text) in entries.iter().zip(&all) {
            let relative = inside.join(name);
            let fate = match text.starts_with('.') {
                true => Fate::LeftOut("hidden"),
                false if is_run && OF_RUN.contains(&text.as_str()) => Fate::LeftOut("of the training run"),
                false if kind.is_dir() => of_directory(text, is_top),
                false if is_top && own.contains(text) => Fate::Written,
                false if is_top && is_description(&relative) => Fate::Written,
                false if is_top => of_top(text, &all),
                false => of_nested(text, &directory),
            };
            match fate {
                Fate::Written => {}
                Fate::LeftOut(reason) => self.left_out.push(LeftOut { path: relative, reason }),
                _ if kind.is_dir() => self.enter(top, relative, own, output)?,
                _ => self.file(top, relative, *kind, fate == Fate::CopiedWeights)?,
            }
        }
        Ok(())
    }

    fn enter(&mut self, top: &Path, relative: PathBuf, own: &HashSet<String>, output: Option<&Path>) -> Result<()> {
        let is_output = output.is_some() && fs::canonicalize(top.join(&relative)).ok().as_deref() == output;
        if is_output {
            return Ok(());
        }
        let before = (self.directories.len(), self.files.len(), self.left_out.len());
        self.directories.push(relative.clone());
        self.walk(top, &relative, own, output)?;
        // An empty directory is copied, one of which nothing is copied is not.
        let (directories, files, left_out) = (self.directories.len(), self.files.len(), self.left_out.len());
        if (directories, files) == (before.0 + 1, before.1) && left_out > before.2 {
            self.directories.pop();
        }
        Ok(())
    }

    fn file(&mut self, top: &Path, relative: PathBuf, kind: FileType, holds_weights: bool) -> Result<()> {
        let path = top.join(&relative);
        let found = fs::metadata(&path).map_err(|source| {
            let action = if kind.is_symlink() { "following the link, which leads nowhere" } else { "looking at it" };
            Error::Io { path: path.clone(), action, source }
        })?;
        if found.is_dir() {
            self.left_out.push(LeftOut { path: relative, reason: "a link to a directory" });
        } else if !found.is_file() {
            self.left_out.push(LeftOut { path: relative, reason: "no regular file" });
        } else {
            if holds_weights {
                self.weights.push(relative.clone());
            }
            self.files.push(relative);
        }
        Ok(())
    }
}

/// The files by which the folder of `twofour train` is recognized.
const RUN_MARKS: [&str; 2] = ["recipe.toml", "metrics.jsonl"];

/// What such a folder holds of the run that made its model: of another model it would not be true, and training would
/// go on there.
const OF_RUN: [&str; 10] = [
    "recipe.toml",
    "metrics.jsonl",
    "lock",
    "report.json",
    "report.svg",
    "decay.json",
    "tokens.safetensors",
    "last",
    "best",
    "checkpoints",
];

const OF_INPUT: &str = "the unconverted model in another form";

fn of_directory(name: &str, is_top: bool) -> Fate {
    let is_numbered = |start: &str| {
        let number = name.strip_prefix(start);
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    let is_state = is_top && (is_numbered("checkpoint-") || is_numbered("global_step"));
    if is_state { Fate::LeftOut("a state of training") } else { Fate::Copied }
}

/// The fate of a file beside the model's weights.
fn of_top(name: &str, all: &[String]) -> Fate {
    if name.starts_with("adapter_model") {
        return Fate::CopiedWeights;
    }
    if naming::is_of_weights(name) {
        // What is left are the shards and indices of models that were passed over, and weights of a name of their own.
        let is_other_form =
            Kind::of(name, all) != Kind::Model || name.ends_with(INDEX_SUFFIX) || naming::shards_of(name).is_some();
        return if is_other_form { Fate::LeftOut(OF_INPUT) } else { Fate::CopiedWeights };
    }
    match end_of(name) {
        Some(Format::PyTorch | Format::Export) => Fate::LeftOut(OF_INPUT),
        None if name.ends_with(".bin.index.json") => Fate::LeftOut(OF_INPUT),
        None => Fate::Copied,
    }
}

/// The fate of a file in a subdirectory.
fn of_nested(name: &str, directory: &Path) -> Fate {
    let is_openvino = || directory.join(name).with_extension("xml").exists();
    match end_of(name) {
        Some(Format::Export) => Fate::LeftOut(OF_INPUT),
        Some(Format::PyTorch) if name.starts_with("consolidated") || is_openvino() => Fate::LeftOut(OF_INPUT),
        Some(Format::PyTorch) => Fate::CopiedWeights,
        None if naming::is_of_weights(name) && name.starts_with("consolidated") => Fate::LeftOut(OF_INPUT),
        None if name.ends_with(naming::WEIGHTS_SUFFIX) => Fate::CopiedWeights,
        None => Fate::Copied,
    }
}

/// Formats of weights beside safetensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    PyTorch,
    /// Of other programs: made from the whole model.
    Export,
}

fn end_of(name: &str) -> Option<Format> {
    match Path::new(name).extension().and_then(OsStr::to_str)? {
        "bin" | "pt" | "pth" | "ckpt" => Some(Format::PyTorch),
        "gguf" | "onnx" | "onnx_data" | "h5" | "msgpack" | "ot" | "tflite" | "mlmodel" => Some(Format::Export),
        _ => None,
    }
}
