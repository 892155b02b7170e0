//! Which file of a directory is the model.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    Index, foreign,
    naming::{INDEX_SUFFIX, Kind, PYTORCH, WEIGHTS_SUFFIX, is_of_weights, ordinary, shards_of},
    unique::quoted,
};
use crate::{Error, Result};

/// The names that transformers gives to a model in one file and to the index of one in several.
const USUAL: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// The index of a directory, or its file of weights. Files that other readers of the directory use stand back:
/// adapters, other formats' `consolidated*`, and variants in another type; where there is a model of the usual name, so
/// do all others.
pub(super) fn find_in_directory(directory: &Path) -> Result<PathBuf> {
    let io = |source| Error::Io { path: directory.to_owned(), action: "listing the directory", source };
    let mut all = Vec::new();
    for entry in fs::read_dir(directory).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if is_of_weights(&name) && !name.starts_with('.') {
            all.push(name);
        }
    }
    all.sort();
    let error = |reason: String| Error::Format { path: directory.to_owned(), reason };
    expect_one_form(&all).map_err(error)?;
    let fault = |reason: String| Err(error(reason));
    let of_kind = |kind| -> Vec<&String> { all.iter().filter(|name| Kind::of(name, &all) == kind).collect() };
    let usual: Vec<&String> = all.iter().filter(|name| USUAL.contains(&ordinary(name))).collect();
    // Shards belong to an index, whatever else is there.
    let mut found = [usual, of_kind(Kind::Model), of_kind(Kind::Consolidated)].into_iter();
    let found = found.find(|names| !names.is_empty()).unwrap_or_default();
    let (indices, files): (Vec<&String>, Vec<&String>) =
        found.into_iter().partition(|name| name.ends_with(INDEX_SUFFIX));
    let at = |name: &String| directory.join(name);
    match (indices.as_slice(), files.as_slice()) {
        ([index], files) => {
            match files.iter().find(|file| is_whole_of(file, index) && !is_shard_of(file, &at(index))) {
                Some(file) => fault(format!(
                    "the directory holds {file} and an index of that name, which names other files; name one of them, \
                     or remove one"
                )),
                None => Ok(at(index)),
            }
        }
        ([], [file]) => match shards_of(file) {
            Some(shards) if shards > 1 => fault(format!(
                "the directory holds {file}, one of {shards} shards, and no index; copy the index and the other \
                 shards, or name the file"
            )),
            _ => Ok(at(file)),
        },
        ([], [])
            if let Some(file) = PYTORCH.map(|name| directory.join(name)).into_iter().find(|file| file.is_file()) =>
        {
            Ok(file)
        }
        ([], []) => fault(match (of_kind(Kind::Adapter).first(), folders_with_safetensors(directory).as_slice()) {
            (Some(adapter), _) => format!(
                "the directory holds {adapter}, which changes the weights of a model, and no model; merge it into its \
                 model, as peft's merge_and_unload does"
            ),
            (None, []) => foreign::instead(directory),
            (None, folders) => format!(
                "the directory holds no .safetensors file, but these folders in it do: {}; name one of them",
                folders.join(", ")
            ),
        }),
        ([], files) => fault(format!(
            "the directory holds {} .safetensors files and no index: {}; name one of them, or, if a conversion was \
             interrupted \
             here, run it again",
            files.len(),
            shown(files)
        )),
        (indices, _) => {
            fault(format!("the directory holds {} indices: {}; name one of them", indices.len(), shown(indices)))
        }
    }
}

/// The first names, quoted.
fn shown(names: &[&String]) -> String {
    let mut shown: Vec<String> = names.iter().take(4).map(|name| quoted(name)).collect();
    if names.len() > 4 {
        shown.push(format!("and {} more", names.len() - 4));
    }
    shown.join(", ")
}

/// An error text where a directory holds the same file of weights packed and ordinary.
fn expect_one_form(all: &[String]) -> std::result::Result<(), String> {
    let is_of_model = |name: &&String| {
        let whole = ordinary(name);
        // A model in one file beside one in several is the same model twice, too.
        USUAL.contains(&whole)
    };
    let packed = all.iter().filter(is_of_model).find(|name| ordinary(name) != name.as_str());
    let plain = all.iter().filter(is_of_model).find(|name| ordinary(name) == name.as_str());
    let twice =
        all.iter().find(|name| ordinary(name) != name.as_str() && all.iter().any(|other| other == ordinary(name)));
    let both = match (packed, plain, twice) {
        (Some(packed), Some(plain), _) => Some((packed.as_str(), plain.as_str())),
        (_, _, Some(packed)) => Some((packed.as_str(), ordinary(packed))),
        _ => None,
    };
    match both {
        None => Ok(()),
        Some((packed, plain)) => Err(format!(
            "the directory holds {}, whose weights are packed, and {}; name one of them, or remove one",
            quoted(packed),
            quoted(plain)
        )),
    }
}

/// Whether a file has the name of an index without its end: the model in one file, beside that in shards.
fn is_whole_of(file: &str, index: &str) -> bool {
    index.strip_suffix(".index.json") == Some(file)
}

/// Whether an index names a file as one of its shards, or cannot be read, which is an error of its own.
fn is_shard_of(file: &str, index: &Path) -> bool {
    let parsed = fs::read(index).ok().and_then(|bytes| Index::parse(index, &bytes).ok());
    parsed.is_none_or(|parsed| parsed.shards().contains(&file))
}

/// The names of the folders of a directory that hold a `.safetensors` file, sorted.
fn folders_with_safetensors(directory: &Path) -> Vec<String> {
    let names = |path: &Path| -> Vec<String> {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let holds_one = |folder: &String| names(&directory.join(folder)).iter().any(|name| name.ends_with(WEIGHTS_SUFFIX));
    let mut folders: Vec<String> = names(directory).into_iter().filter(holds_one).collect();
    folders.sort();
    folders
}
