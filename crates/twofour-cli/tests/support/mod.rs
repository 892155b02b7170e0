//! Running the built command on small files.

#![allow(unreachable_pub)]

mod ran;
pub mod training;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::Command,
};

pub use ran::{Ran, names};
use safetensors::{Dtype, tensor::TensorView};

/// The command, with a plain environment.
pub fn twofour() -> Command {
    ran::plain(env!("CARGO_BIN_EXE_twofour"))
}

/// Runs the command in a directory.
pub fn run(directory: &Path, arguments: &[&str]) -> Ran {
    twofour().args(arguments).current_dir(directory).output().unwrap().into()
}

/// A tensor for a test file: f32.
pub type Floats = (Vec<usize>, Vec<f32>);

/// Writes a safetensors file with the reference implementation.
pub fn write(path: &Path, tensors: &[(&str, Floats)]) {
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, (shape, data))| {
            (name.to_string(), shape.clone(), data.iter().flat_map(|v| v.to_le_bytes()).collect())
        })
        .collect();
    let views: HashMap<String, TensorView<'_>> = bytes
        .iter()
        .map(|(name, shape, data)| (name.clone(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap()))
        .collect();
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Numbers between -1 and 1, none of them zero.
pub fn random(shape: &[usize]) -> Floats {
    let mut state = 0x1234_5678_9ABC_DEF1u64;
    let data = (0..shape.iter().product())
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32 + 0.5) / (1u64 << 23) as f32 - 1.0
        })
        .collect();
    (shape.to_vec(), data)
}

/// A directory with `model.safetensors`: two layers, an embedding, a norm, a bias and a head.
pub fn model() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    write(
        &path,
        &[
            ("embed.weight", random(&[16, 32])),
            ("layers.0.up.weight", random(&[24, 32])),
            ("layers.0.up.bias", random(&[24])),
            ("layers.0.norm.weight", random(&[32])),
            ("layers.0.down.weight", random(&[32, 24])),
            ("head.weight", random(&[16, 32])),
        ],
    );
    (directory, path)
}

/// A file as JSON.
#[track_caller]
pub fn read_json(path: impl AsRef<Path>) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A checkpoint of the fixtures, as transformers writes it.
pub fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../twofour-nn/tests/fixtures/checkpoints").join(family)
}

/// The same as an argument.
pub fn checkpoint(family: &str) -> String {
    fixture(family).to_string_lossy().into_owned()
}

/// Copies the files of a directory to another one, which is made.
pub fn copy(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    std::fs::create_dir_all(&to).unwrap();
    for name in names(from.as_ref()) {
        std::fs::copy(from.as_ref().join(&name), to.as_ref().join(&name)).unwrap();
    }
}

/// Letters of the fixtures' vocabulary in no simple order.
pub fn letters(count: usize) -> String {
    let letters = b"acdefghiklmnoprstuvwyz";
    (0..count).map(|i| if i % 7 == 3 { ' ' } else { char::from(letters[i * i / 3 % letters.len()]) }).collect()
}
