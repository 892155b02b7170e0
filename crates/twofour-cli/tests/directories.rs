//! A matrix of directories that the command writes against its readers: what `eval` and `generate` compute, what
//! `check` and `inspect` find, and what `decompress` gives back.

use std::{fs, path::Path};

use serde_json::Value;

use crate::support::{self, fixture, names, run};

/// A checkpoint with a module in a folder, as sentence-transformers has them, and files that no output should have.
fn checkpoint(family: &str, to: &Path) {
    fs::create_dir_all(to.join("2_Dense")).unwrap();
    support::copy(fixture(family), to);
    support::write(&to.join("2_Dense/model.safetensors"), &[("linear.weight", support::random(&[4, 8]))]);
    fs::write(to.join("pytorch_model.bin"), "of the dense model").unwrap();
    fs::write(to.join(".gitattributes"), "").unwrap();
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The directories that commands write of a checkpoint, by name.
const OUTPUTS: [(&str, &[&str]); 5] = [
    ("pruned", &["prune", "in", "-o", "pruned"]),
    ("compressed", &["compress", "pruned", "-o", "compressed"]),
    ("int8", &["quantize", "pruned", "-o", "int8", "--dtype", "int8", "--head", "int8"]),
    ("int8-group", &["quantize", "compressed", "-o", "int8-group", "--dtype", "int8", "--group", "128"]),
    ("int4", &["quantize", "pruned", "-o", "int4", "--dtype", "int4"]),
];

#[test]
fn every_directory_that_is_written_is_read_and_decompressed() {
    // One file, and three with an index.
    for family in ["qwen2", "llama"] {
        let root = tempfile::tempdir().unwrap();
        let at = root.path();
        checkpoint(family, &at.join("in"));
        fs::write(at.join("text.txt"), "the quick brown fox jumps over the lazy dog ".repeat(6)).unwrap();
        let eval = |model: &str| {
            let arguments = ["eval", model, "--text", "text.txt", "--window", "24", "--dtype", "f32", "--json"];
            run(at, &arguments).good().json()["perplexity"].as_f64().unwrap()
        };
        for (name, arguments) in OUTPUTS {
            let answer = run(at, &[arguments, &["--json"]].concat()).good().json();
            let beside = &answer["beside"];
            assert_eq!(beside["copied_weights"], serde_json::json!(["2_Dense/model.safetensors"]), "{name}");
            let out = at.join(name);
            let copied = |path: &str| fs::read(out.join(path)).unwrap() == fs::read(at.join("in").join(path)).unwrap();
            assert!(copied("2_Dense/model.safetensors") && copied("tokenizer.json"), "{name}");
            assert!(!out.join("pytorch_model.bin").exists() && !out.join(".gitattributes").exists(), "{name}");
            let is_packed = name != "pruned";
            let config = read_json(&out.join("config.json"));
            assert_eq!(config.get("quantization_config").is_some(), is_packed, "{name}");
            assert_eq!(out.join("README-twofour.md").exists(), is_packed, "{name}");
            let weights: Vec<String> = names(&out).into_iter().filter(|name| name.contains("safetensors")).collect();
            assert!(weights.iter().all(|file| file.starts_with("twofour-") == is_packed), "{name}: {weights:?}");

            // The readers.
            run(at, &["check", name]).good();
            let inspected = run(at, &["inspect", name, "--json"]).good().json();
            let tensors = inspected["tensors"].as_array().unwrap();
            assert_eq!(tensors.iter().any(|tensor| tensor["compressed"] == true), is_packed, "{name}");
            let text = run(at, &["generate", name, "--prompt", "the", "--length", "3", "--json"]).good().json();
            assert!(!text["token_ids"].as_array().unwrap().is_empty(), "{name}");
            // What was compressed is the same model; rounding changes it a little.
            let ratio = eval(name) / eval("pruned");
            let most = if name == "int4" {
                0.5
            } else if name.starts_with("int8") {
                0.05
            } else {
                0.005
            };
            assert!((ratio - 1.0).abs() < most, "{family} {name}: {ratio}");
            if !is_packed {
                continue;
            }
            // A file of weights in the directory is read as well as the directory.
            let whole =
                weights.iter().find(|file| *file == "twofour-model.safetensors" || file.ends_with("index.json"));
            assert_eq!(eval(&format!("{name}/{}", whole.unwrap())), eval(name), "{name}");

            let back = format!("{name}-dense");
            run(at, &["decompress", name, "-o", &back]).good();
            assert_eq!(names(&at.join(&back)), names(&at.join("pruned")), "{name}");
            assert_eq!(read_json(&at.join(&back).join("config.json")), read_json(&at.join("in/config.json")), "{name}");
            run(at, &["check", &back]).good();
            let dense = run(at, &["inspect", &back, "--json"]).good().json();
            let is_float = |tensor: &Value| matches!(tensor["dtype"].as_str(), Some("F32" | "BF16" | "F16"));
            assert!(dense["tensors"].as_array().unwrap().iter().all(is_float), "{name}: {dense}");
            if name == "compressed" {
                for file in names(&at.join(&back)).iter().filter(|file| file.ends_with(".safetensors")) {
                    let bytes = |directory: &str| fs::read(at.join(directory).join(file)).unwrap();
                    assert_eq!(bytes(&back), bytes("pruned"), "{file}");
                }
            }
            let ratio = eval(&back) / eval(name);
            assert!((ratio - 1.0).abs() < 0.05, "{family} {back}: {ratio}");
        }
    }
}

/// Wanda and SparseGPT do not treat the weights of other modules, and lose none.
#[test]
fn calibrated_methods_copy_modules_in_folders_and_encoders_are_read_packed() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    checkpoint("bert", &at.join("in"));
    fs::write(at.join("text.txt"), "the quick brown fox jumps over the lazy dog ".repeat(40)).unwrap();
    let calibrated = ["--method", "wanda", "--calibration", "text.txt", "--samples", "2", "--length", "16"];
    let shown = run(at, &[&["prune", "in", "-o", "wanda"], &calibrated[..]].concat()).good().stdout;
    assert!(shown.contains("copied unchanged: 2_Dense/model.safetensors"), "{shown}");
    assert!(shown.contains("left out, hidden: .gitattributes") && shown.contains(": pytorch_model.bin"), "{shown}");
    assert!(at.join("wanda/2_Dense/model.safetensors").exists());
    run(at, &["compress", "wanda", "-o", "small"]).good();
    run(at, &["check", "small"]).good();
}

/// Other weights beside the model stand in nobody's way, and a quantized model of another tool is named.
#[test]
fn the_model_is_found_beside_others_and_files_of_a_checkpoint_can_be_named() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    checkpoint("qwen2", &at.join("in"));
    fs::write(at.join("text.txt"), "the quick brown fox ".repeat(8)).unwrap();
    let eval = |model: &str| run(at, &["eval", model, "--text", "text.txt", "--window", "24", "--json"]);
    let expected = eval("in").good().json();
    for name in ["consolidated.safetensors", "model.fp16.safetensors", "adapter_model.safetensors"] {
        fs::copy(at.join("in/model.safetensors"), at.join("in").join(name)).unwrap();
    }
    assert_eq!(eval("in").good().json()["perplexity"], expected["perplexity"]);
    assert_eq!(eval("in/model.fp16.safetensors").good().json()["perplexity"], expected["perplexity"]);
    let answer = run(at, &["prune", "in", "-o", "out", "--json"]).good().json();
    assert_eq!(answer["beside"]["left_out"].as_array().unwrap().len(), 4, "{answer}");
    assert!(at.join("out/adapter_model.safetensors").exists() && !at.join("out/consolidated.safetensors").exists());

    let config = read_json(&at.join("in/config.json"));
    let with = |field: Value| {
        let mut config = config.clone();
        config["quantization_config"] = field;
        fs::write(at.join("in/config.json"), config.to_string()).unwrap();
    };
    with(serde_json::json!({"quant_method": "compressed-tensors", "sparsity_config": {"format": "dense"}}));
    assert_eq!(eval("in").good().json()["perplexity"], expected["perplexity"]);
    run(at, &["prune", "in", "-o", "plain"]).good();
    assert_eq!(read_json(&at.join("plain/config.json")), config);
    with(serde_json::json!({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}));
    let message = eval("in").bad(1);
    assert!(message.contains("compressed-tensors, sparse-24-bitmask"), "{message}");
    let message = run(at, &["compress", "in", "-o", "no", "--prune"]).bad(1);
    assert!(message.contains("compressed-tensors, sparse-24-bitmask") && !at.join("no").exists(), "{message}");
}

/// Two runs into one directory do not mix their shards.
#[test]
fn of_two_runs_at_once_each_output_is_one_of_them() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path();
    for family in ["in", "other"] {
        checkpoint("llama", &at.join(family));
    }
    run(at, &["prune", "other", "-o", "other-pruned", "--pattern", "1:4"]).good();
    run(at, &["prune", "in", "-o", "in-pruned"]).good();
    for _ in 0..4 {
        let start = |input: &str| {
            support::twofour().args(["prune", input, "-o", "out", "--force", "-q"]).current_dir(at).spawn().unwrap()
        };
        let both = [start("in-pruned"), start("other-pruned")];
        let succeeded = both.map(|mut child| child.wait().unwrap().success());
        assert!(succeeded.contains(&true));
        let files = || names(&at.join("out")).into_iter().filter(|name| name.ends_with(".safetensors"));
        let is_of = |input: &str| {
            files().all(|file| {
                fs::read(at.join("out").join(&file)).unwrap() == fs::read(at.join(input).join(&file)).unwrap()
            })
        };
        assert!(is_of("in-pruned") || is_of("other-pruned"));
        assert!(!names(&at.join("out")).iter().any(|name| name.starts_with(".twofour")));
    }
}
