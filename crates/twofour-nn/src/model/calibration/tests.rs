//! Calibration against the models that it runs block by block.

use std::{collections::BTreeMap, path::Path};

use half::{bf16, f16};
use twofour::file::{Reorder, StoredDType};

use super::*;
use crate::model::{Encoder, EncoderInput};

/// Shows all inputs of the next block, as it is stored.
fn observe_all(calibration: &mut Calibration<'_>, observe: &mut dyn FnMut(Observation<'_>)) -> Result<()> {
    for index in 0..calibration.inputs()?.len() {
        calibration.observe(index, &|_| None, &mut |observation, _| observe(observation))?;
    }
    Ok(())
}

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
            let observed = observe_all(&mut calibration, &mut |Observation { input, x, tokens }| {
                inputs += x.len();
                for weight in &input.weights {
                    let shape = &checkpoint.reader().tensor(weight).unwrap().info.shape;
                    assert_eq!(x.len(), tokens * shape[usize::from(!input.is_transposed)], "{weight}");
                    seen.entry(weight.clone()).or_default().push(tokens);
                }
            });
            observed.unwrap();
            calibration.advance(&|_| None).unwrap();
        }
        assert!(calibration.inputs().is_err() && inputs > 0);
        assert!(calibration.observe(0, &|_| None, &mut |_, _| {}).is_err());
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
        calibration.advance(replace).map(|()| calibration.texts()[0].to_vec())
    };
    let plain = of(&|_| None).unwrap();
    let zeroed = of(&|name| name.ends_with("down_proj.weight").then(|| vec![0.0; 16 * 24])).unwrap();
    assert_ne!(plain, zeroed);
    assert!(of(&|name| name.ends_with("down_proj.weight").then(Vec::new)).is_err());
    assert!(Calibration::new(&checkpoint, &[vec![]]).is_err() && Calibration::new(&checkpoint, &[vec![80]]).is_err());
}

/// What each linear layer read, by the name of its weight.
type Inputs = BTreeMap<String, Vec<f32>>;

fn record(inputs: &mut Inputs, Observation { input, x, tokens }: Observation<'_>) {
    assert!(!input.is_transposed && tokens > 0);
    for weight in &input.weights {
        inputs.entry(weight.clone()).or_default().extend_from_slice(x);
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
        observe_all(&mut calibration, &mut |input| record(&mut found, input)).unwrap();
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
        calibration.texts().concat()
    };
    assert_ne!(of(&zeroed), of(&|_| None));
    assert!(Calibration::new(checkpoint.as_ref(), &[vec![1; 41]]).is_err());
    assert!(Calibration::new(checkpoint.as_ref(), &[vec![80]]).is_err());
}

/// The elements of a stored tensor.
fn values(reader: &Reader, name: &str) -> Vec<f32> {
    let tensor = reader.tensor(name).unwrap();
    match tensor.info.dtype {
        StoredDType::F16 => tensor.elements::<f16>().unwrap().iter().map(|value| value.to_f32()).collect(),
        StoredDType::BF16 => tensor.elements::<bf16>().unwrap().iter().map(|value| value.to_f32()).collect(),
        _ => tensor.to_vec().unwrap(),
    }
}

/// The products of a stored weight, `[tokens, out_features]`.
fn products(reader: &Reader, input: &BlockInput, x: &[f32], tokens: usize) -> Vec<f32> {
    let weight = values(reader, &input.weights[0]);
    let inputs = x.len() / tokens;
    let outputs = weight.len() / inputs;
    let at = |out: usize, i: usize| if input.is_transposed { i * outputs + out } else { out * inputs + i };
    let product = |x: &[f32], out: usize| x.iter().enumerate().map(|(i, x)| x * weight[at(out, i)]).sum();
    x.chunks(inputs).flat_map(|x| (0..outputs).map(move |out| product(x, out))).collect()
}

#[test]
fn inputs_are_those_of_the_pruned_and_of_the_stored_block_however_much_is_kept() {
    for family in ["llama", "qwen3", "gemma2", "gpt2"] {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints").join(family);
        let checkpoint = Checkpoint::open(directory).unwrap();
        let texts = [vec![3u32, 5, 7, 11, 13, 17, 19, 23, 29], vec![2, 4, 8]];
        let is_changed = |name: &str| {
            ["v_proj.weight", "up_proj.weight", "c_fc.weight", "c_attn.weight"].iter().any(|end| name.ends_with(end))
        };
        let halved = |name: &str| values(checkpoint.reader(), name).into_iter().map(|value| value / 2.0).collect();
        let replace = |name: &str| is_changed(name).then(|| halved(name));
        let plain = || Calibration::new(&checkpoint, &texts).unwrap();
        // What each model alone reads.
        let (mut pruned, mut stored) = (plain(), plain());
        let room = |bytes, dense| plain().with_room(bytes).beside_dense_of(dense).unwrap().keeping_entry().unwrap();
        // The stored model's states of all texts, and of the first alone.
        let mut both = [(room(0, usize::MAX), 2), (room(u64::MAX, usize::MAX), 2), (room(0, 1), 1)];
        while !pruned.is_finished() {
            let before: Vec<Vec<f32>> = pruned.texts().into_iter().map(<[f32]>::to_vec).collect();
            for index in 0..pruned.inputs().unwrap().len() {
                let (mut own, mut dense) = (vec![], vec![]);
                pruned.observe(index, &replace, &mut |seen, _| own.push(seen.x.to_vec())).unwrap();
                stored.observe(index, &|_| None, &mut |seen, _| dense.push(seen.x.to_vec())).unwrap();
                for (both, has_dense) in &mut both {
                    let mut number = 0;
                    both.observe(index, &replace, &mut |seen, beside| {
                        assert_eq!(seen.x, own[number], "{family} {index}");
                        assert!(number >= *has_dense || !matches!(beside, Beside::Nothing), "{family} {index}");
                        match beside {
                            Beside::Inputs(x) => assert_eq!(x, dense[number], "{family} {index}"),
                            Beside::Outputs(y) => {
                                let tokens = texts[number].len();
                                let expected = products(checkpoint.reader(), seen.input, &dense[number], tokens);
                                assert!(y.len() == expected.len(), "{family} {index}");
                                assert!(y.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-4), "{family} {index}");
                            }
                            Beside::Nothing => assert!(number >= *has_dense, "{family} {index}"),
                        }
                        number += 1;
                    })
                    .unwrap();
                    assert!(number == 2 && both.entry().unwrap() == before, "{family}");
                    if index > 0 {
                        assert!(both.observe(index - 1, &replace, &mut |_, _| {}).is_err());
                    }
                }
            }
            pruned.advance(&replace).unwrap();
            stored.advance(&|_| None).unwrap();
            // From the block's entry again: the same.
            both[1].0.rewind().unwrap();
            for (both, has_dense) in &mut both {
                both.advance(&replace).unwrap();
                assert_eq!(both.texts(), pruned.texts(), "{family}");
                assert_eq!(both.dense_texts().unwrap(), stored.texts()[..*has_dense], "{family}");
            }
        }
    }
}

#[test]
fn a_family_that_nothing_reads_is_refused_with_all_that_are() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "rwkv"}"#).unwrap();
    let error = open_blockwise(folder.path()).unwrap_err().to_string();
    assert!(error.contains("rwkv") && error.contains("llama") && error.contains("bert"), "{error}");
}

/// An order of runs of features, the same within each set: every run backwards, every second one from its middle on.
fn an_order(features: &FreeFeatures, all: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..all).collect();
    for (number, set) in features.sets.iter().enumerate() {
        for first in set {
            let run = &mut order[*first..*first + features.len];
            run.reverse();
            run.rotate_left(number % 2 * features.len / 2);
        }
    }
    order
}

#[test]
fn a_model_with_its_free_features_in_another_order_computes_the_same() {
    for family in
        ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "bert", "deepseek_v2_lite", "deepseek_v3"]
    {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints").join(family);
        let checkpoint = open_blockwise(&directory).unwrap();
        let reader = checkpoint.reader();
        let texts = [vec![3u32, 5, 7, 11, 13, 17, 19, 23, 29], vec![2, 4, 8]];
        let [mut plain, mut ordered] = [(); 2].map(|()| Calibration::new(checkpoint.as_ref(), &texts).unwrap());
        let mut tensors = 0;
        while !plain.is_finished() {
            let mut orders = BTreeMap::new();
            let of_axis =
                |is_rows, order| if is_rows { Reorder::rows(order) } else { Reorder::columns(order) }.unwrap();
            for (index, input) in plain.inputs().unwrap().iter().enumerate() {
                let Some(features) = plain.free_features(index).unwrap() else { continue };
                let [weight] = input.weights.as_slice() else { panic!("{family}: {input:?}") };
                let columns = reader.tensor(weight).unwrap().info.shape[usize::from(!input.is_transposed)];
                let order = an_order(&features, columns);
                for OutputOrder { weight, bias, is_transposed, order } in features.outputs(&order).unwrap() {
                    bias.map(|bias| orders.insert(bias, Reorder::rows(order.clone()).unwrap()));
                    orders.insert(weight, of_axis(!is_transposed, order));
                }
                orders.insert(weight.clone(), of_axis(input.is_transposed, order.clone()));
                // Runs of one set in two orders, and an order across runs.
                let mut bad = order.clone();
                bad.swap(0, 1);
                assert_eq!(features.outputs(&bad).is_some(), features.sets[0].len() == 1, "{family}");
                bad.rotate_left(1);
                assert!(
                    features.sets.len() * features.sets[0].len() == 1 || features.outputs(&bad).is_none(),
                    "{family}"
                );
            }
            tensors += orders.len();
            let replace = |name: &str| {
                let order = orders.get(name)?;
                Some(order.apply(&reader.tensor(name).unwrap().info.shape, &values(reader, name)).unwrap())
            };
            plain.advance(&|_| None).unwrap();
            ordered.advance(&replace).unwrap();
            for (a, b) in plain.texts().concat().iter().zip(ordered.texts().concat()) {
                assert!((a - b).abs() < 1e-4 * a.abs().max(1.0), "{family}: {a} {b}");
            }
        }
        assert!(tensors >= 4, "{family}: {tensors}");
    }
}
