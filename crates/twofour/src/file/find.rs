//! Which file of a directory is the model.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::Index;
use crate::{Error, Result};

/// The end of an index's file name.
pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// The index of a directory, or its only `.safetensors` file.
pub(super) fn find_in_directory(directory: &Path) -> Result<PathBuf> {
    let io = |source| Error::Io { path: directory.to_owned(), action: "listing the directory", source };
    let (mut indices, mut files) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(directory).map_err(io)? {
        let name = entry.map_err(io)?.file_name();
        let text = name.to_string_lossy();
        if text.ends_with(INDEX_SUFFIX) {
            indices.push(directory.join(&name));
        } else if text.ends_with(".safetensors") {
            files.push(directory.join(&name));
        }
    }
    let fault = |reason: String| Err(Error::Format { path: directory.to_owned(), reason });
    match (indices.as_mut_slice(), files.as_mut_slice()) {
        ([index], files) => match files.iter().find(|file| is_whole_of(file, index) && !is_shard_of(file, index)) {
            Some(file) => fault(format!(
                "the directory holds {} and an index of that name, which names other files; name one of them, or remove one",
                named(file)
            )),
            None => Ok(std::mem::take(index)),
        },
        ([], [file]) => match shards_of(&named(file)) {
            Some(shards) if shards > 1 => fault(format!(
                "the directory holds {}, one of {shards} shards, and no index; copy the index and the other shards, or name the file",
                named(file)
            )),
            _ => Ok(std::mem::take(file)),
        },
        ([], []) => fault(match folders_with_safetensors(directory).as_slice() {
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

fn named(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether a file has the name of an index without its end: the model in one file, beside that in shards.
fn is_whole_of(file: &Path, index: &Path) -> bool {
    named(index).strip_suffix(".index.json").is_some_and(|whole| named(file) == whole)
}

/// Whether an index names a file as one of its shards, or cannot be read, which is an error of its own.
fn is_shard_of(file: &Path, index: &Path) -> bool {
    let parsed = fs::read(index).ok().and_then(|bytes| Index::parse(index, &bytes).ok());
    parsed.is_none_or(|parsed| parsed.shards().contains(&named(file).as_str()))
}

/// The number of shards that a name tells, as in `model-00002-of-00004.safetensors`.
fn shards_of(name: &str) -> Option<u32> {
    let (rest, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (_, number) = rest.rsplit_once('-')?;
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(number) && is_number(count)).then(|| count.parse().ok())?
}

/// The names of the folders of a directory that hold a `.safetensors` file, sorted.
fn folders_with_safetensors(directory: &Path) -> Vec<String> {
    let names = |path: &Path| -> Vec<String> {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let holds_one = |folder: &String| names(&directory.join(folder)).iter().any(|name| name.ends_with(".safetensors"));
    let mut folders: Vec<String> = names(directory).into_iter().filter(holds_one).collect();
    folders.sort();
    folders
}
