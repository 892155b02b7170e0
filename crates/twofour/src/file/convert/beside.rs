//! The files of a model's directory beside its tensors: configuration, tokenizer, licence.

use std::{
    collections::HashSet,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use super::{
    super::{Reader, naming::INDEX_SUFFIX},
    description::is_description,
};
use crate::{Error, Result};

/// The ends of names of files that hold weights: those of the input, in whatever format, are not those of the output.
const WEIGHTS: [&str; 11] =
    ["safetensors", "bin", "pt", "pth", "ckpt", "gguf", "onnx", "onnx_data", "h5", "msgpack", "ot"];

/// The files that a conversion of a model's directory copies to `output`, as paths relative to that directory: those beside its tensors that are not hidden and hold no
/// weights, in whatever format; none for a model that is a single file.
///
/// # Errors
/// A directory that cannot be listed.
pub fn files_beside(reader: &Reader, output: &Path) -> Result<Vec<PathBuf>> {
    Ok(Beside::of(reader, output)?.files)
}

/// Directories inside each other, at most.
const DEEPEST: usize = 8;

/// What is copied: paths relative to the model's directory, a directory before what it holds.
#[derive(Debug, Default)]
pub(super) struct Beside {
    pub(super) directories: Vec<PathBuf>,
    pub(super) files: Vec<PathBuf>,
}

impl Beside {
    /// Every file of the model's directory, and of those inside it, that is not hidden and holds no weights, and the directories that hold such files. Links to files are followed, as in the
    /// hub's cache; links to directories are not. The output's own directory is left out.
    pub(super) fn of(reader: &Reader, output: &Path) -> Result<Self> {
        let mut found = Self::default();
        if let Some(directory) = reader.directory() {
            let output = fs::canonicalize(output).ok();
            let index = reader.index().and_then(|(path, _)| path.file_name()).map(OsString::from);
            found.walk(directory, Path::new(""), &index.into_iter().collect(), output.as_deref(), DEEPEST)?;
            let Self { directories, files } = &mut found;
            directories.retain(|directory| files.iter().any(|file| file.starts_with(directory)));
        }
        Ok(found)
    }

    fn walk(
        &mut self,
        top: &Path,
        inside: &Path,
        excluded: &HashSet<OsString>,
        output: Option<&Path>,
        depth: usize,
    ) -> Result<()> {
        let directory = top.join(inside);
        let io = |source| Error::Io { path: directory.clone(), action: "listing the directory", source };
        let mut names = Vec::new();
        for entry in fs::read_dir(&directory).map_err(io)? {
            let entry = entry.map_err(io)?;
            names.push((entry.file_name(), entry.file_type().map_err(io)?));
        }
        names.sort_by(|a, b| a.0.cmp(&b.0));
        for (name, kind) in names {
            let (text, relative) = (name.to_string_lossy(), inside.join(&name));
            let path = top.join(&relative);
            if text.starts_with('.') || excluded.contains(&name) {
                continue;
            }
            if kind.is_dir() {
                let is_output = output.is_some() && fs::canonicalize(&path).ok().as_deref() == output;
                if depth > 0 && !is_output {
                    self.directories.push(relative.clone());
                    self.walk(top, &relative, excluded, output, depth - 1)?;
                }
            } else if path.is_file() && !holds_weights(&text) && !is_description(&relative) {
                self.files.push(relative);
            }
        }
        Ok(())
    }
}

fn holds_weights(name: &str) -> bool {
    let end = name.rsplit_once('.').map_or("", |(_, end)| end);
    WEIGHTS.contains(&end) || name.ends_with(INDEX_SUFFIX) || name.ends_with(".bin.index.json")
}
