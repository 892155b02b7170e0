//! Files and folders that an earlier version wrote are read as that version read them.
//!
//! `fixtures/earlier` was written by commit 6c449b6: a tiny Qwen2, pruned, as `compress` and `quantize` store it
//! (`int8-group64` in version 2 of the format, the others in version 1), and the folder of a run that was interrupted
//! after 6 of 20 steps, beside the metrics of the whole run.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::support::run;
use serde_json::Value;
use twofour::file::Reader;

fn earlier(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/earlier").join(name)
}

/// FNV-1a of all tensors' names and bytes.
fn digest(directory: &Path) -> u64 {
    let reader = Reader::open(directory).unwrap();
    let mut names: Vec<String> = reader.tensors().map(|tensor| tensor.name.clone()).collect();
    names.sort();
    let mut digest = 0xcbf2_9ce4_8422_2325u64;
    for name in names {
        let bytes = reader.tensor(&name).unwrap().bytes().unwrap();
        for byte in name.bytes().chain(bytes.iter().copied()) {
            digest = (digest ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    digest
}

#[test]
fn weights_decompress_to_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    for (name, expected) in [
        ("compressed", 0xe158_2bc5_0f07_bcf9),
        ("int8", 0x3182_d5f5_f04e_2410),
        ("int8-group64", 0xc5f4_fc8a_cdc5_5a6a),
        ("int4", 0xe9b0_8391_796d_4796),
    ] {
        let model = earlier(name);
        run(directory.path(), &["check", &model.to_string_lossy()]).good();
        run(directory.path(), &["decompress", &model.to_string_lossy(), "-o", name]).good();
        assert_eq!(digest(&directory.path().join(name)), expected, "{name}");
    }
}

/// The figures of steps, without what the clock decides.
fn losses(file: &Path) -> Vec<(u64, f64)> {
    let line = |line: &str| -> (u64, f64) {
        let step: Value = serde_json::from_str(line).unwrap();
        (step["step"].as_u64().unwrap(), step["loss"].as_f64().unwrap())
    };
    fs::read_to_string(file).unwrap().lines().map(line).collect()
}

#[test]
fn an_interrupted_run_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    fs::create_dir_all(at.join("run/last")).unwrap();
    for file in ["text.txt", "run/recipe.toml", "run/metrics.jsonl", "run/last/checkpoint.safetensors"] {
        fs::copy(earlier(file), at.join(file)).unwrap();
    }
    let text = at.join("text.txt").to_string_lossy().into_owned();
    let recipe = fs::read_to_string(at.join("run/recipe.toml")).unwrap().replace("\"text.txt\"", &format!("{text:?}"));
    fs::write(at.join("run/recipe.toml"), &recipe).unwrap();
    fs::write(at.join("recipe.toml"), recipe).unwrap();
    let ran = run(at, &["train", "recipe.toml", "-o", "run"]).good();
    assert!(ran.stdout.contains("going on from step 6"), "{ran:?}");
    let (found, whole) = (losses(&at.join("run/metrics.jsonl")), losses(&earlier("whole.jsonl")));
    assert_eq!(found.len(), 20);
    for (found, whole) in found.iter().zip(&whole) {
        // Engines round differently.
        assert!(found.0 == whole.0 && (found.1 - whole.1).abs() < 1e-3, "{found:?} {whole:?}");
    }
}
