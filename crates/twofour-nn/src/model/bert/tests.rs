//! Gradients of the encoder against finite differences of its loss, and its hidden states against those of inference.

use std::path::Path;

use twofour::layer::Accumulate;

use super::{Bert, BertBatch, BertConfig, BertSamples, EncoderTask};
use crate::{
    block::BatchShape,
    engine::{Kind, Memory as _, cpu::CpuEngine},
    model::{EncoderCheckpoint, EncoderInput, GptConfig, TransformerConfig},
    random::Stream,
};

const ENGINE: CpuEngine = CpuEngine;

fn config(task: EncoderTask) -> BertConfig {
    let sizes = GptConfig { layers: 2, width: 8, heads: 2, context: 12, feed_forward: 16 };
    let mut encoder = TransformerConfig::bert(&sizes, 23);
    encoder.norm.epsilon = 1e-5;
    BertConfig { encoder, task, positions: 10 }
}

/// A model whose every parameter is random, so that each matters.
fn model(task: EncoderTask) -> Bert<CpuEngine> {
    let mut model = Bert::build(&ENGINE, &config(task), |name, shape| {
        let (stream, mean) = (Stream::new(3, name), if name.ends_with("norm.weight") { 1.0 } else { 0.0 });
        let count: usize = shape.iter().product();
        Ok((0..count as u64).map(|i| (mean + 0.3 * stream.normal(i)) as f32).collect())
    });
    let model = model.as_mut().unwrap();
    model.begin_training(&ENGINE).unwrap();
    std::mem::replace(model, Bert::new(&ENGINE, config(task), 0).unwrap())
}

struct Owned {
    tokens: Vec<u32>,
    types: Vec<u32>,
    places: Vec<u32>,
    targets: Vec<u32>,
}

fn samples(task: EncoderTask) -> Owned {
    let tokens = (0..20u32).map(|i| i * i % 23).collect();
    let types = (0..20).map(|i| u32::from(i % 10 > 4)).collect();
    let (places, targets) = match task {
        EncoderTask::MaskedTokens => (vec![1, 4, 2, 9], vec![5, 7, 11, 22]),
        EncoderTask::Answers => (vec![], vec![3, 5, 0, 9]),
    };
    Owned { tokens, types, places, targets }
}

impl Owned {
    fn borrowed(&self) -> BertSamples<'_> {
        let Owned { tokens, types, places, targets } = self;
        BertSamples { sequences: 2, tokens, types, places, targets }
    }
}

fn loss(model: &mut Bert<CpuEngine>, samples: &Owned) -> f64 {
    let mut loss = ENGINE.zeros(Kind::Wide, 1).unwrap();
    model.loss(&ENGINE, samples.borrowed(), &mut loss).unwrap();
    f64::from(ENGINE.read(&loss).unwrap()[0])
}

#[test]
fn gradients_of_every_parameter_agree_with_finite_differences() {
    for task in [EncoderTask::MaskedTokens, EncoderTask::Answers] {
        let (mut model, samples) = (model(task), samples(task));
        let mut found = ENGINE.zeros(Kind::Wide, 1).unwrap();
        model.gradients(&ENGINE, samples.borrowed(), (1.0, Accumulate::Overwrite), &mut found).unwrap();
        let found = f64::from(ENGINE.read(&found).unwrap()[0]);
        assert!((found - loss(&mut model, &samples)).abs() < 1e-5);
        let count = model.parameters().len();
        let names: Vec<String> = model.parameters().iter().map(|p| p.name().to_owned()).collect();
        let changeable: Vec<String> = model.parameters_mut().iter().map(|p| p.name().to_owned()).collect();
        assert_eq!(names, changeable);
        for (index, name) in names.iter().enumerate().take(count) {
            let values = ENGINE.read(model.parameters()[index].master()).unwrap();
            let gradient = ENGINE.read(model.parameters()[index].gradient().unwrap()).unwrap();
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            // What is added to the scores of all positions alike changes no probability.
            if task == EncoderTask::Answers && ["blocks.1.mlp.norm.bias", "answers.bias"].contains(&name.as_str()) {
                let moved: Vec<f32> = values.iter().enumerate().map(|(i, v)| v + 0.3 * (i as f32 - 1.0)).collect();
                let before = loss(&mut model, &samples);
                model.parameters_mut()[index].write(&ENGINE, &moved).unwrap();
                let after = loss(&mut model, &samples);
                model.parameters_mut()[index].write(&ENGINE, &values).unwrap();
                assert!(norm < 1e-5 && (before - after).abs() < 1e-4, "{name}: {norm}, {before} and {after}");
                continue;
            }
            assert!(norm > 1e-4, "{task:?} {name}: a gradient of norm {norm}");
            // Along the gradient, so that the derivative is its norm.
            let h = 4e-3;
            let mut along = |by: f64| {
                let moved = values.iter().zip(&gradient).map(|(v, g)| v + (by * f64::from(*g) / norm) as f32);
                model.parameters_mut()[index].write(&ENGINE, &moved.collect::<Vec<_>>()).unwrap();
                loss(&mut model, &samples)
            };
            let numeric = (along(h) - along(-h)) / (2.0 * h);
            model.parameters_mut()[index].write(&ENGINE, &values).unwrap();
            assert!(
                (numeric - norm).abs() < 2e-2 * norm.max(0.02),
                "{task:?} {name}: {numeric}, by the gradient {norm}"
            );
        }
    }
}

#[test]
fn gradients_are_added_and_scaled_where_asked() {
    for task in [EncoderTask::MaskedTokens, EncoderTask::Answers] {
        let (mut model, samples) = (model(task), samples(task));
        let mut loss = ENGINE.zeros(Kind::Wide, 1).unwrap();
        let mut read = |scale: f32, accumulate: Accumulate| -> Vec<f32> {
            model.gradients(&ENGINE, samples.borrowed(), (scale, accumulate), &mut loss).unwrap();
            model.parameters().iter().flat_map(|p| ENGINE.read(p.gradient().unwrap()).unwrap()).collect()
        };
        let once = read(1.0, Accumulate::Overwrite);
        let twice = read(1.0, Accumulate::Add);
        assert!(once.iter().zip(&twice).all(|(a, b)| (2.0 * a - b).abs() < 1e-5 * a.abs().max(1.0)), "{task:?}");
        let half = read(0.5, Accumulate::Overwrite);
        assert!(once.iter().zip(&half).all(|(a, b)| (0.5 * a - b).abs() < 1e-5 * a.abs().max(1.0)), "{task:?}");
    }
}

#[test]
fn hidden_states_are_those_of_inference() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/bert");
    let checkpoint = EncoderCheckpoint::open(directory).unwrap();
    let encoder = checkpoint.inference::<f32>().unwrap();
    let sequences: [[u32; 8]; 2] = [[1, 5, 9, 30, 11, 2, 71, 0], [1, 3, 5, 7, 11, 13, 17, 19]];
    let types: [[u32; 8]; 2] = [[0, 0, 0, 1, 1, 1, 1, 1], [0; 8]];
    let inputs: Vec<_> =
        sequences.iter().zip(&types).map(|(tokens, types)| EncoderInput { tokens, types: Some(types) }).collect();
    let expected = encoder.forward(&inputs).unwrap().concat();
    for task in [EncoderTask::MaskedTokens, EncoderTask::Answers] {
        let mut model = checkpoint.model(&ENGINE, task, 8, 0).unwrap();
        let shape = BatchShape { batch: 2, positions: 8 };
        let inputs = (sequences.as_flattened(), types.as_flattened());
        let batch = BertBatch::of_sequences(&ENGINE, model.config(), inputs, shape).unwrap();
        model.encode(&ENGINE, &batch, shape).unwrap();
        let found = model.hidden(&ENGINE, inputs.0, inputs.1, shape).unwrap();
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4) && found.len() == expected.len());
    }
}

#[test]
fn samples_that_do_not_fit_are_refused() {
    let mut model = model(EncoderTask::Answers);
    let mut loss = ENGINE.zeros(Kind::Wide, 1).unwrap();
    let good = samples(EncoderTask::Answers);
    let mut refused = |change: &dyn Fn(&mut Owned)| {
        let mut bad = samples(EncoderTask::Answers);
        change(&mut bad);
        model.loss(&ENGINE, bad.borrowed(), &mut loss).is_err()
    };
    assert!(refused(&|s| s.tokens[3] = 23) && refused(&|s| s.types[3] = 2) && refused(&|s| s.targets[1] = 10));
    assert!(refused(&|s| s.targets.truncate(3)) && refused(&|s| s.types.truncate(3)) && refused(&|s| s.tokens.clear()));
    model.loss(&ENGINE, good.borrowed(), &mut loss).unwrap();
    let short = BertConfig { positions: 13, ..config(EncoderTask::Answers) };
    assert!(Bert::new(&ENGINE, short, 0).is_err(), "sequences longer than the context");
}
