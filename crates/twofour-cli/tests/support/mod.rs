//! Running the built command on small files.

#![allow(dead_code, unreachable_pub, missing_docs)] // Each test binary uses a part.

pub mod training;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use safetensors::{Dtype, tensor::TensorView};

/// The command, with a plain environment.
pub fn twofour() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_twofour"));
    command.env_remove("TWOFOUR_LOG").env_remove("TWOFOUR_ENGINE").env_remove("NO_COLOR");
    command
}

/// What a run gave.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ran { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

/// Runs the command in a directory.
pub fn run(directory: &Path, arguments: &[&str]) -> Ran {
    twofour().args(arguments).current_dir(directory).output().unwrap().into()
}

impl Ran {
    /// The run, which must have succeeded without a word on stderr.
    #[track_caller]
    pub fn good(self) -> Self {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{self:?}");
        self
    }

    /// The message of a run that must have failed with that exit code, with nothing on stdout.
    #[track_caller]
    pub fn bad(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(self.stderr.starts_with("error: "), "{self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
        assert_eq!(self.stdout, "");
        self.stderr
    }

    /// Stdout as JSON.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }
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

/// The names in a directory, sorted.
pub fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// A file as JSON.
#[track_caller]
pub fn read_json(path: impl AsRef<Path>) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
