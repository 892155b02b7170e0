//! What lies beside a model's weights: configuration, tokenizer, texts.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// Ends of names of weights, in this format or another: a copy would be of the model before the conversion.
const WEIGHTS: [&str; 16] = [
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".ggml",
    ".onnx",
    ".onnx_data",
    ".tflite",
    ".ot",
    ".npz",
];

/// Subdirectories in subdirectories are followed so far.
const DEPTH: usize = 8;

/// Returns the paths, inside the directory, of all files that are no weights and not hidden, sorted, and those of the subdirectories that hold them, outer ones first. `output` is
/// left out where it is inside. Links to files are followed, links to directories are not.
pub(super) fn companions(directory: &Path, output: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
    let output = fs::canonicalize(output).ok();
    let (mut files, mut directories) = (Vec::new(), Vec::new());
    let mut open = vec![(PathBuf::new(), 0)];
    while let Some((inside, depth)) = open.pop() {
        let path = directory.join(&inside);
        let failed = |source: io::Error| Error::Io { path: path.clone(), action: "listing the directory", source };
        let before = files.len();
        for entry in fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let text = name.to_string_lossy();
            let relative = inside.join(&name);
            if text.starts_with('.') {
                continue;
            }
            let is_directory = entry.file_type().map_err(failed)?.is_dir();
            let is_output = || output.is_some() && fs::canonicalize(entry.path()).ok() == output;
            if is_directory && depth < DEPTH && !is_output() {
                open.push((relative, depth + 1));
            } else if !WEIGHTS.iter().any(|end| text.ends_with(end)) && entry.path().is_file() && !is_output() {
                files.push(relative);
            }
        }
        if files.len() > before && depth > 0 {
            directories.push(inside);
        }
    }
    files.sort();
    directories.sort();
    Ok((files, directories))
}
