//! Calibration against the models that it runs block by block.

use std::{collections::BTreeMap, path::Path};

use super::*;
use crate::model::{Encoder, EncoderInput};

#[test]
fn blocks_one_by_one_compute_what_the_model_does() {
    for family in ["llama", "mistral", "qwen2", "qwen3", "gpt2"] {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints").join(family);
        let checkpoint = Checkpoint::open(directory).unwrap();
        let texts = [vec![3u32, 5, 7, 11, 13, 17, 19, 23, 29], vec![2, 4, 8]];
        let mut calibration = Calibration::new(&checkpoint, &texts).unwrap();
        let mut seen: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        let mut inputs = 0;
        while !calibration.is_finished() {
            let observed = calibration.observe(&mut |input| {
                inputs += input.x.len();
                for weight in input.weights {
                    let shape = &checkpoint.reader().tensor(weight).unwrap().info.shape;
                    assert_eq!(input.x.len(), input.tokens * shape[usize::from(!input.is_transposed)], "{weight}");
                    seen.entry(weight.clone()).or_default().push(input.tokens);
                }
            });
            observed.unwrap();
            calibration.advance(&|_| None).unwrap();
        }
        assert!(calibration.observe(&mut |_| {}).is_err() && inputs > 0);
        let is_linear = |name: &str| name.contains("proj.weight") || (name.contains(".c_") && name.ends_with("weight"));
        let linears = checkpoint.reader().tensors().filter(|tensor| is_linear(&tensor.name));
        let names: Vec<_> = linears.map(|tensor| tensor.name.clone()).collect();
        assert!(seen.len() == names.len() && seen.values().all(|tokens| tokens == &[9, 3]), "{family}: {seen:?}");
        // Through the norm and the head, the hidden states are the model's logits.
        let model = checkpoint.inference::<f32>().unwrap();
        for (text, x) in texts.iter().zip(calibration.texts()) {
            let expected = model.session().logits(text).unwrap();
            let found = model.head_of(x).unwrap();
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4), "{family}");
        }
    }
}

#[test]
fn replaced_weights_are_computed_with() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/llama");
    let checkpoint = Checkpoint::open(directory).unwrap();
    let of = |replace: Replace<'_>| {
        let mut calibration = Calibration::new(&checkpoint, &[vec![3, 5, 7]]).unwrap();
        calibration.advance(replace).map(|()| calibration.texts()[0].clone())
    };
    let plain = of(&|_| None).unwrap();
    let zeroed = of(&|name| name.ends_with("down_proj.weight").then(|| vec![0.0; 16 * 24])).unwrap();
    assert_ne!(plain, zeroed);
    assert!(of(&|name| name.ends_with("down_proj.weight").then(Vec::new)).is_err());
    assert!(Calibration::new(&checkpoint, &[vec![]]).is_err() && Calibration::new(&checkpoint, &[vec![80]]).is_err());
}

/// What each linear layer read, by the name of its weight.
type Inputs = BTreeMap<String, Vec<f32>>;

fn record(inputs: &mut Inputs, observation: Observation<'_>) {
    assert!(!observation.is_transposed && observation.tokens > 0);
    for weight in observation.weights {
        inputs.entry(weight.clone()).or_default().extend_from_slice(observation.x);
    }
}

#[test]
fn blocks_of_an_encoder_one_by_one_read_and_compute_what_the_encoder_does() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/bert");
    let checkpoint = open_blockwise(&directory).unwrap();
    let texts = [vec![1u32, 5, 7, 11, 13, 17, 19, 23, 0], vec![1, 4, 8, 0]];
    let mut calibration = Calibration::new(checkpoint.as_ref(), &texts).unwrap();
    let mut found = Inputs::new();
    while !calibration.is_finished() {
        calibration.observe(&mut |input| record(&mut found, input)).unwrap();
        calibration.advance(&|_| None).unwrap();
    }
    let encoder = Encoder::<f32>::load(&directory).unwrap();
    let mut expected = Inputs::new();
    for (text, x) in texts.iter().zip(calibration.texts()) {
        let input = EncoderInput { tokens: text, types: None };
        let hidden = encoder.forward_observed(&[input], &mut |input| record(&mut expected, input)).unwrap();
        assert!(x.iter().zip(&hidden[0]).all(|(a, b)| (a - b).abs() < 1e-5) && x.len() == hidden[0].len());
    }
    // The pooler reads the first token of each text.
    let pooler = found.remove("pooler.dense.weight").unwrap();
    assert_eq!(pooler, calibration.texts().iter().flat_map(|x| x[..16].to_vec()).collect::<Vec<_>>());
    assert_eq!(found.len(), 2 * 6, "{:?}", found.keys());
    assert!(found.keys().eq(expected.keys()));
    for (name, x) in &found {
        let shape = &checkpoint.reader().tensor(name).unwrap().info.shape;
        assert_eq!(x.len(), 13 * shape[1], "{name}");
        assert!(x.iter().zip(&expected[name]).all(|(a, b)| (a - b).abs() < 1e-5), "{name}");
    }
    // A replaced weight changes what comes out of its block.
    let zeroed = |name: &str| name.ends_with("0.output.dense.weight").then(|| vec![0.0; 16 * 24]);
    let of = |replace: Replace<'_>| {
        let mut calibration = Calibration::new(checkpoint.as_ref(), &texts).unwrap();
        calibration.advance(replace).unwrap();
        calibration.texts().to_vec()
    };
    assert_ne!(of(&zeroed), of(&|_| None));
    assert!(Calibration::new(checkpoint.as_ref(), &[vec![1; 41]]).is_err());
    assert!(Calibration::new(checkpoint.as_ref(), &[vec![80]]).is_err());
}

#[test]
fn a_family_that_nothing_reads_is_refused_with_all_that_are() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "rwkv"}"#).unwrap();
    let error = open_blockwise(folder.path()).unwrap_err().to_string();
    assert!(error.contains("rwkv") && error.contains("llama") && error.contains("bert"), "{error}");
}
