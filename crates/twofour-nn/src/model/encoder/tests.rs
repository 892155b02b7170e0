//! BERT against what transformers computes (`tests/fixtures/checkpoints.py`).

use std::{
    fs,
    path::{Path, PathBuf},
};

use half::bf16;
use serde::Deserialize;
use twofour::DataType;

use super::{Encoder, EncoderInput, MaskedEncoder, SentenceEncoder};
use crate::model::{EncoderCheckpoint, Tokenizer};

#[derive(Deserialize)]
struct Expected {
    text: String,
    tokens: Vec<u32>,
    sequences: Vec<Sequence>,
}

#[derive(Deserialize)]
struct Sequence {
    tokens: Vec<u32>,
    types: Vec<u32>,
    hidden: Vec<f32>,
    pooled: Vec<f32>,
}

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/bert")
}

fn expected() -> Expected {
    serde_json::from_slice(&fs::read(directory().join("expected.json")).unwrap()).unwrap()
}

fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0f32, |most, (a, b)| most.max((a - b).abs()))
}

#[test]
fn hidden_states_and_pooler_are_those_of_transformers() {
    let (encoder, expected) = (Encoder::<f32>::load(directory()).unwrap(), expected());
    let tokenizer = Tokenizer::read(&directory().join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer.encode(&expected.text).unwrap(), expected.tokens);
    let inputs: Vec<_> =
        expected.sequences.iter().map(|s| EncoderInput { tokens: &s.tokens, types: Some(&s.types) }).collect();
    let hidden = encoder.forward(&inputs).unwrap();
    for (hidden, sequence) in hidden.iter().zip(&expected.sequences) {
        assert!(distance(hidden, &sequence.hidden) < 1e-4, "{}", distance(hidden, &sequence.hidden));
        let pooled = encoder.pooled(hidden).unwrap().unwrap();
        assert!(distance(&pooled, &sequence.pooled) < 1e-4);
    }
    // One by one, and in a narrower type.
    let alone = encoder.forward(&inputs[1..2]).unwrap();
    assert!(distance(&alone[0], &hidden[1]) < 1e-5);
    let narrow = Encoder::<bf16>::load(directory()).unwrap().forward(&inputs).unwrap();
    assert!(distance(&narrow[0], &hidden[0]) < 0.2 && narrow != hidden);
}

#[test]
fn every_linear_layer_is_observed_and_bad_sequences_are_refused() {
    let encoder = Encoder::<f32>::load(directory()).unwrap();
    let (mut names, mut elements) = (vec![], vec![]);
    let input = EncoderInput { tokens: &[3, 4, 5], types: None };
    let outcome = encoder.forward_observed(&[input, input], &mut |seen| {
        assert_eq!(seen.tokens, 6);
        names.extend(seen.input.weights.iter().cloned());
        elements.push(seen.x.len());
    });
    outcome.unwrap();
    assert_eq!(names.len(), 2 * 6, "{names:?}");
    assert!(names[0].ends_with("encoder.layer.0.attention.self.query.weight"), "{names:?}");
    assert_eq!(elements[..4], [6 * 16, 6 * 16, 6 * 16, 6 * 24]);
    for (tokens, types) in
        [(&[][..], None), (&[80], None), (&[1], Some(&[2u32][..])), (&[1], Some(&[])), (&[1; 41], None)]
    {
        assert!(encoder.forward(&[EncoderInput { tokens, types }]).is_err(), "{tokens:?} {types:?}");
    }
}

#[derive(Deserialize)]
struct ExpectedMasked {
    text: String,
    perplexity: Vec<ExpectedPerplexity>,
}

#[derive(Deserialize)]
struct ExpectedPerplexity {
    window: usize,
    perplexity: f64,
    tokens: usize,
}

#[test]
fn the_perplexity_of_masked_tokens_is_that_of_transformers() {
    let directory = directory().with_file_name("bert_masked");
    let expected: ExpectedMasked = serde_json::from_slice(&fs::read(directory.join("expected.json")).unwrap()).unwrap();
    let checkpoint = EncoderCheckpoint::open(&directory).unwrap();
    let model = MaskedEncoder::load(&checkpoint, DataType::F32).unwrap();
    let tokens = checkpoint.tokenizer().unwrap().encode(&expected.text).unwrap();
    for ExpectedPerplexity { window, perplexity, tokens: count } in expected.perplexity {
        let found = model.perplexity(&tokens, window, &mut |_, _| {}).unwrap();
        assert_eq!(found.tokens, count);
        assert!((found.perplexity / perplexity - 1.0).abs() < 1e-4, "{} and {perplexity}", found.perplexity);
    }
    for window in [2, 41] {
        assert!(model.perplexity(&tokens, window, &mut |_, _| {}).is_err(), "{window}");
    }
    assert!(model.perplexity(&[], 12, &mut |_, _| {}).is_err());
    let headless = EncoderCheckpoint::open(self::directory()).unwrap();
    let error = MaskedEncoder::load(&headless, DataType::F32).unwrap_err().to_string();
    assert!(error.contains("no head for masked tokens"), "{error}");
}

#[test]
fn embeddings_of_sentences_are_what_their_modules_make_of_hidden_states() {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(directory()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let encoder = Encoder::<f32>::load(folder.path()).unwrap();
    let tokens = Tokenizer::read(&directory().join("tokenizer.json")).unwrap().encode("two of every four").unwrap();
    let hidden = encoder.forward(&[EncoderInput { tokens: &tokens, types: None }]).unwrap().concat();
    let unit = |rows: &[f32]| -> Vec<f64> {
        let sum: Vec<f64> = (0..16).map(|i| rows.iter().skip(i).step_by(16).map(|v| f64::from(*v)).sum()).collect();
        let norm = sum.iter().map(|v| v * v).sum::<f64>().sqrt();
        sum.iter().map(|v| v / norm).collect()
    };
    let near = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-9);
    let embedding =
        || SentenceEncoder::load(folder.path(), DataType::F32).unwrap().embedding("two of every four", 40).unwrap();
    assert!(near(&embedding(), &unit(&hidden)));
    fs::create_dir(folder.path().join("1_Pooling")).unwrap();
    let pooling = folder.path().join("1_Pooling/config.json");
    fs::write(&pooling, r#"{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}"#).unwrap();
    assert!(near(&embedding(), &unit(&hidden[..16])));
    fs::write(&pooling, r#"{"pooling_mode": "lasttoken"}"#).unwrap();
    assert!(near(&embedding(), &unit(&hidden[hidden.len() - 16..])));

    // What is not supported is named.
    let refused = || SentenceEncoder::load(folder.path(), DataType::F32).unwrap_err().to_string();
    for wrong in [r#"{"pooling_mode": "median"}"#, r#"{"pooling_mode": ["cls", "median"]}"#, "{}"] {
        fs::write(&pooling, wrong).unwrap();
        assert!(refused().contains("1_Pooling/config.json: `pooling_mode`"), "{}", refused());
    }
    fs::write(&pooling, r#"{"pooling_mode": "mean"}"#).unwrap();
    let modules = |types: &[(&str, &str)]| {
        let named = |kind: &str| format!("sentence_transformers.models.{kind}");
        let list: Vec<_> =
            types.iter().map(|(kind, path)| serde_json::json!({"type": named(kind), "path": path})).collect();
        fs::write(folder.path().join("modules.json"), serde_json::Value::from(list).to_string()).unwrap();
    };
    modules(&[("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]);
    assert!(near(&embedding(), &unit(&hidden)));
    for types in [
        &[("Transformer", ""), ("Pooling", "1_Pooling"), ("LSTM", "2_LSTM")][..],
        &[("Transformer", ""), ("Dense", "1_Dense"), ("Pooling", "2_Pooling")],
        &[("Transformer", "")],
    ] {
        modules(types);
        assert!(refused().contains("modules.json: `type`"), "{}", refused());
    }
    modules(&[("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]);
    fs::create_dir(folder.path().join("2_Dense")).unwrap();
    let dense = folder.path().join("2_Dense/config.json");
    for (config, named) in [
        (r#"{"in_features": 16}"#, "`out_features`"),
        (r#"{"in_features": 8, "out_features": 4}"#, "`in_features` = 8"),
        (r#"{"in_features": 16, "out_features": 4, "activation_function": "torch.nn.GELU"}"#, "torch.nn.GELU"),
        (r#"{"in_features": 16, "out_features": 4, "use_residual": true}"#, "`use_residual`"),
        (r#"{"in_features": 16, "out_features": 4, "module_input_name": "token_embeddings"}"#, "`module_input_name`"),
        (r#"{"in_features": 16, "out_features": 4}"#, "model.safetensors"),
    ] {
        fs::write(&dense, config).unwrap();
        assert!(refused().contains("2_Dense") && refused().contains(named), "{}", refused());
    }
}
