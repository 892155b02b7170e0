//! BERT against what transformers computes (`tests/fixtures/checkpoints.py`).

use std::{
    fs,
    path::{Path, PathBuf},
};

use half::bf16;
use serde::Deserialize;

use super::{Encoder, EncoderInput};
use crate::model::Tokenizer;

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
    let outcome = encoder.forward_observed(&[input, input], &mut |input| {
        assert_eq!(input.tokens, 6);
        names.extend(input.weights.iter().cloned());
        elements.push(input.x.len());
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
