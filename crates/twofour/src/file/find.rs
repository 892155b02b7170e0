//! Which file of a directory is the model.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// The end of an index's file name.
pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// The index of a directory, or its only `.safetensors` file.
pub(super) fn find_in_directory(directory: &Path) -> Result<PathBuf> {
    let io = |source| Error::Io { path: directory.to_owned(), action: "listing the directory", source };
    let (mut indices, mut files, mut folders) = (Vec::new(), Vec::new(), Vec::new());
    for entry in fs::read_dir(directory).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        let text = name.to_string_lossy();
        if text.ends_with(INDEX_SUFFIX) {
            indices.push(directory.join(&name));
        } else if text.ends_with(".safetensors") {
            files.push(directory.join(&name));
        } else if holds_safetensors(&directory.join(&name)) {
            folders.push(text.into_owned());
        }
    }
    folders.sort();
    let fault = |reason: String| Err(Error::Format { path: directory.to_owned(), reason });
    match (indices.as_mut_slice(), files.as_mut_slice()) {
        ([index], _) => Ok(std::mem::take(index)),
        ([], [file]) => Ok(std::mem::take(file)),
        ([], []) => fault(match folders.as_slice() {
            [] => "the directory holds no .safetensors file".to_owned(),
            folders => format!(
                "the directory holds no .safetensors file, but these folders in it do: {}; name one of them",
                folders.join(", ")
            ),
        }),
        ([], files) => fault(format!(
            "the directory holds {} .safetensors files and no index; name one of them, or, if a conversion was interrupted \
             here, run it again",
            files.len()
        )),
        (indices, _) => fault(format!("the directory holds {} indices; name one of them", indices.len())),
    }
}

/// Whether a path is a directory with a `.safetensors` file.
fn holds_safetensors(path: &Path) -> bool {
    let has_one = |entries: fs::ReadDir| {
        entries.flatten().any(|entry| entry.file_name().to_string_lossy().ends_with(".safetensors"))
    };
    fs::read_dir(path).is_ok_and(has_one)
}
