//! Tuning of a pruned block of every family.

use std::{cell::RefCell, collections::HashMap, path::PathBuf};

use twofour::{Axis, MatrixRef, Pattern, select::magnitude};

use super::{BlockTexts, BlockTuning, PrunedBlock, TunedBlock, Tuner, WeightRounding, steps_of};
use crate::{
    Result,
    block::Workspace,
    engine::{ErrorMeasure, Kind, Memory as _, StepOperations as _, cpu::CpuEngine},
    model::{Checkpoint, Layer},
    random::Stream,
};

const TUNING: BlockTuning = BlockTuning { passes: 30, learning_rate: 2e-3, measure: ErrorMeasure::RelativeSquared };
const BLOCK: usize = 1;

fn checkpoint(family: &str) -> Checkpoint {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints").join(family);
    Checkpoint::open(folder).unwrap()
}

/// Weights by their stored names.
type Weights = HashMap<String, Vec<f32>>;

/// The weights of the block's linear layers of which `is_pruned`, as they are stored, 2:4 by magnitude.
fn pruned(checkpoint: &Checkpoint, is_pruned: impl Fn(&str) -> bool) -> Weights {
    let (parts, mut all) = (checkpoint.parts(), Weights::new());
    for (layer, out, inputs) in checkpoint.config().linear_layers() {
        if layer.starts_with(&format!("blocks.{BLOCK}.")) {
            let values = parts.values(&format!("{layer}.weight")).unwrap();
            let matrix = MatrixRef::new(out, inputs, &values).unwrap();
            let mask = magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
            all.extend(parts.split(&layer, &mask.apply(matrix).unwrap()));
        }
    }
    all.retain(|name, _| is_pruned(name));
    all
}

/// Texts of different lengths.
fn texts(width: usize) -> Vec<Vec<f32>> {
    let stream = Stream::new(5, "texts");
    let text = |(number, tokens): (usize, &usize)| {
        (0..tokens * width).map(|i| stream.normal((1000 * number + i) as u64) as f32).collect()
    };
    [12, 9, 12, 12].iter().enumerate().map(text).collect()
}

/// The block's outputs on texts, with some weights replaced.
fn outputs(checkpoint: &Checkpoint, texts: &[Vec<f32>], weights: &Weights) -> Vec<Vec<f32>> {
    let replace = |name: &str| weights.get(name).cloned();
    let parts = checkpoint.parts().replacing(Some(&replace));
    let width = checkpoint.config().width;
    let of = |text: &Vec<f32>| {
        let layer = Layer::build(&CpuEngine, checkpoint.config().clone(), BLOCK, |name, _| parts.values(name)).unwrap();
        let views = [text.as_slice()];
        let steps = steps_of(&CpuEngine, BlockTexts { inputs: &views, outputs: &views }, width).unwrap();
        let (loss, guard) = (CpuEngine.zeros(Kind::Wide, 1).unwrap(), CpuEngine.step_guard(1).unwrap());
        let (engine, workspace, measure) = (&CpuEngine, Workspace::default(), ErrorMeasure::Squared);
        let mut tuner = Tuner { engine, layer, steps, workspace, measure, loss, guard };
        CpuEngine.read(&tuner.forward(0).unwrap().0).unwrap()
    };
    texts.iter().map(of).collect()
}

fn views(texts: &[Vec<f32>]) -> Vec<&[f32]> {
    texts.iter().map(Vec::as_slice).collect()
}

fn tune(checkpoint: &Checkpoint, weights: &Weights, tuning: BlockTuning) -> Result<TunedBlock> {
    let texts = texts(checkpoint.config().width);
    let dense = outputs(checkpoint, &texts, &Weights::new());
    let replace = |name: &str| weights.get(name).cloned();
    let is_pruned = |name: &str| weights.contains_key(name);
    let block = PrunedBlock { index: BLOCK, replace: &replace, is_pruned: &is_pruned, rounding: None };
    let texts = BlockTexts { inputs: &views(&texts), outputs: &views(&dense) };
    checkpoint.tune_block(&CpuEngine, &block, texts, tuning, &|| false)
}

fn error(found: &[Vec<f32>], dense: &[Vec<f32>]) -> f64 {
    let pairs = found.iter().flatten().zip(dense.iter().flatten());
    pairs.map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

#[test]
fn pruned_blocks_of_every_family_come_nearer_to_the_dense_ones_and_keep_their_zeros() {
    for family in ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2"] {
        for measure in [ErrorMeasure::Squared, ErrorMeasure::RelativeSquared] {
            let checkpoint = checkpoint(family);
            let before = pruned(&checkpoint, |_| true);
            let tuned = tune(&checkpoint, &before, BlockTuning { measure, ..TUNING }).unwrap();
            assert!(tuned.errors[1] < 0.8 * tuned.errors[0], "{family}, {measure:?}: {:?}", tuned.errors);
            let after: Weights = tuned.weights.into_iter().collect();
            assert_eq!(after.len(), before.len(), "{family}");
            for (name, before) in &before {
                assert_eq!(before.len(), after[name].len(), "{name}");
                assert!(before.iter().zip(&after[name]).all(|(b, a)| *b != 0.0 || *a == 0.0), "{family}: {name}");
                assert!(before != &after[name], "{family}: {name}");
            }
            // As they are stored they compute what was found.
            let texts = texts(checkpoint.config().width);
            let dense = outputs(&checkpoint, &texts, &Weights::new());
            let [old, new] = [&before, &after].map(|weights| error(&outputs(&checkpoint, &texts, weights), &dense));
            assert!(new < 0.8 * old, "{family}, {measure:?}: {new}, before {old}");
        }
    }
}

#[test]
fn integers_come_nearer_to_the_dense_block_and_stay_integers_times_their_scales() {
    const LARGEST: f32 = 7.0;
    for family in ["llama", "qwen2", "gemma3", "gpt2"] {
        let checkpoint = checkpoint(family);
        let floats = pruned(&checkpoint, |_| true);
        let step = |weights: &[f32]| weights.iter().fold(0f32, |most, w| most.max(w.abs())) / LARGEST;
        let scales: Weights = floats
            .iter()
            .map(|(name, w)| (name.clone(), w.iter().map(|v| if *v == 0.0 { 0.0 } else { step(w) }).collect()))
            .collect();
        let mut before = floats.clone();
        for (name, weight) in &mut before {
            let (old, scales) = (weight.clone(), &scales[name]);
            twofour_transformer::cpu::grid::round(LARGEST, scales, &old, weight);
        }
        let texts = texts(checkpoint.config().width);
        let dense = outputs(&checkpoint, &texts, &Weights::new());
        let (replace, of) = (|name: &str| before.get(name).cloned(), |name: &str| scales.get(name).cloned());
        let own = |name: &str| floats.get(name).cloned();
        let rounding = Some(WeightRounding { largest: LARGEST, scales: &of, floats: &own });
        let block = PrunedBlock { index: BLOCK, replace: &replace, is_pruned: &|_| true, rounding };
        let views = BlockTexts { inputs: &views(&texts), outputs: &views(&dense) };
        let tuning = BlockTuning { passes: 60, ..TUNING };
        let tuned = checkpoint.tune_block(&CpuEngine, &block, views, tuning, &|| false).unwrap();
        let after: Weights = tuned.weights.into_iter().collect();
        assert_eq!(after.len(), before.len(), "{family}");
        for (name, values) in &after {
            for (value, scale) in values.iter().zip(&scales[name]) {
                let integer = if *scale == 0.0 { 0.0 } else { (value / scale).round() };
                assert!(integer.abs() <= LARGEST && *value == integer * scale, "{family}: {name}");
            }
        }
        let [old, new] = [&before, &after].map(|weights| error(&outputs(&checkpoint, &texts, weights), &dense));
        assert!(new < 0.9 * old, "{family}: {new}, before {old}");
    }
    // Scales of another weight, and none.
    let checkpoint = checkpoint("llama");
    let (texts, short) = (texts(checkpoint.config().width), |_: &str| Some(vec![1.0]));
    let views = BlockTexts { inputs: &views(&texts), outputs: &views(&texts) };
    for (scales, words) in [(&short as &dyn Fn(&str) -> Option<Vec<f32>>, "a replaced weight"), (&|_| None, "scales")] {
        let rounding = Some(WeightRounding { largest: LARGEST, scales, floats: &short });
        let block = PrunedBlock { index: BLOCK, replace: &|_| None, is_pruned: &|_| true, rounding };
        let error = checkpoint.tune_block(&CpuEngine, &block, views, TUNING, &|| false).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn layers_that_are_pruned_in_part_stay_as_they_are() {
    let checkpoint = checkpoint("llama");
    let some = |name: &str| name.contains("q_proj") || name.contains("down_proj");
    let weights = pruned(&checkpoint, some);
    assert_eq!(weights.len(), 2);
    let tuned = tune(&checkpoint, &weights, TUNING).unwrap();
    let names: Vec<&str> = tuned.weights.iter().map(|(name, _)| name.as_str()).collect();
    assert!(names.len() == 1 && names[0].ends_with("down_proj.weight"), "{names:?}");
    let none = tune(&checkpoint, &pruned(&checkpoint, |name| name.contains("q_proj")), TUNING).unwrap();
    assert!(none.weights.is_empty() && none.errors[0] == none.errors[1], "{none:?}");
}

#[test]
fn tuning_that_makes_it_worse_leaves_the_weights_and_wrong_settings_are_refused() {
    let checkpoint = checkpoint("qwen2");
    let weights = pruned(&checkpoint, |_| true);
    let far = tune(&checkpoint, &weights, BlockTuning { passes: 1, learning_rate: 1e3, ..TUNING }).unwrap();
    assert!(far.weights.is_empty(), "{:?}", far.errors);
    for wrong in [
        BlockTuning { passes: 0, ..TUNING },
        BlockTuning { learning_rate: 0.0, ..TUNING },
        BlockTuning { learning_rate: f64::NAN, ..TUNING },
    ] {
        assert!(tune(&checkpoint, &weights, wrong).unwrap_err().to_string().contains("at least one pass"));
    }
    let width = checkpoint.config().width;
    let replace = |_: &str| None;
    let block = PrunedBlock { index: BLOCK, replace: &replace, is_pruned: &|_| true, rounding: None };
    let [whole, half] = [vec![0.5; 2 * width], vec![0.5; width + 1]];
    let asked = RefCell::new(0);
    let run = |inputs: &[&[f32]], outputs: &[&[f32]]| {
        checkpoint.tune_block(&CpuEngine, &block, BlockTexts { inputs, outputs }, TUNING, &|| {
            *asked.borrow_mut() += 1;
            *asked.borrow() > 1
        })
    };
    for (inputs, outputs) in [(&whole, &half), (&half, &half)] {
        let error = run(&[inputs], &[outputs]).unwrap_err().to_string();
        assert!(error.contains("whole tokens"), "{error}");
    }
    assert!(run(&[&whole, &whole], &[&whole]).unwrap_err().to_string().contains("texts behind a block"));
    assert!(run(&[], &[]).unwrap().weights.is_empty());
    let error = run(&[&whole], &[&whole]).unwrap_err();
    assert!(matches!(error, crate::Error::Core(twofour::Error::Interrupted)), "{error}");
    let short = |_: &str| Some(vec![1.0]);
    let block = PrunedBlock { index: BLOCK, replace: &short, is_pruned: &|_| true, rounding: None };
    let texts = BlockTexts { inputs: &[&whole], outputs: &[&whole] };
    let error = checkpoint.tune_block(&CpuEngine, &block, texts, TUNING, &|| false).unwrap_err().to_string();
    assert!(error.contains("a replaced weight"), "{error}");
}
