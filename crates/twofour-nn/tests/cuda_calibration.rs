//! On a device: calibration on the GPU against calibration on the CPU. Without a device the tests skip; with
//! `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

mod support;

use std::collections::BTreeMap;

use serde_json::Value;
use tempfile::TempDir;
use twofour::calibration::StatisticKind;
use twofour_cuda::solve::GpuBackend;
use twofour_nn::model::{
    Beside, BlockwiseCheckpoint, Calibration, Gathered as _, GpuRunner, Host, Replace, Runner, States, open_blockwise,
};

use support::{
    checkpoints::{self, HEAD, directory, scattered},
    device,
};

/// A decoder of a family with heads of [`HEAD`] elements and random weights in f32.
fn with_wide_heads(family: &str) -> TempDir {
    let is_gpt2 = family == "gpt2";
    let change = |config: &mut Value| match is_gpt2 {
        true => config["n_embd"] = 128.into(),
        false => config["head_dim"] = HEAD.into(),
    };
    checkpoints::rewritten(family, change, |config, index, name, shape| {
        let shape: Vec<usize> = match is_gpt2 {
            true => shape.iter().map(|n| if [16, 48].contains(n) { 8 * n } else { *n }).collect(),
            false => checkpoints::with_wide_heads(config, name, shape),
        };
        let values = (0..shape.iter().product()).map(|at| scattered(index, &shape, at)).collect();
        (shape, values)
    })
}

/// Values in host memory.
fn host<R: Runner>(runner: &R, view: <R::States as States>::View<'_>) -> Vec<f32> {
    runner.to_host(view).unwrap().into_owned()
}

/// What one run shows: of each input of each block the values of all texts, what is beside them, and their statistic;
/// and in the end the hidden states.
fn shown<R: Runner>(runner: &R, checkpoint: &dyn BlockwiseCheckpoint, replace: Replace<'_>) -> Vec<Vec<f32>> {
    // Alike, of one token, and of another length; the windows of the models that have some are shorter than the first.
    let texts: Vec<Vec<u32>> =
        [31u32, 31, 1, 12].iter().map(|len| (0..*len).map(|i| 1 + (i * i * 7 + len * i) % 70).collect()).collect();
    let mut calibration = Calibration::on(runner, checkpoint, &texts).unwrap();
    calibration = calibration.beside_dense_of(usize::MAX).unwrap().keeping_entry().unwrap();
    let mut found = vec![];
    while !calibration.is_finished() {
        let mut previewed = vec![];
        calibration.preview(usize::MAX, &mut |seen, _| previewed.extend(host(runner, seen.x))).unwrap();
        found.push(previewed);
        for index in 0..calibration.inputs().unwrap().len() {
            let mut gathered = None;
            let (mut own, mut dense) = (vec![], vec![]);
            let observed = calibration.observe(index, replace, &mut |seen, beside| {
                own.extend(host(runner, seen.x));
                let view = match beside {
                    Beside::Inputs(view) | Beside::Outputs(view) => view,
                    Beside::Nothing => panic!("the dense model was not run"),
                };
                dense.extend(host(runner, view));
                let features = R::States::count(seen.x) / seen.tokens;
                let gathered = gathered
                    .get_or_insert_with(|| runner.gather(StatisticKind::Hessian, features, None).unwrap().unwrap());
                // The pooler reads one token of each text.
                if features * seen.tokens == R::States::count(seen.x) {
                    let _ = gathered.add(seen.x, None);
                }
            });
            observed.unwrap();
            let (statistic, _) = gathered.unwrap().finish().unwrap();
            found.extend([own, dense, statistic.hessian().unwrap().symmetric()]);
        }
        found.push(calibration.entry().unwrap().into_iter().flat_map(|view| host(runner, view)).collect());
        calibration.rewind().unwrap();
        calibration.advance(replace).unwrap();
    }
    found.push(calibration.texts().into_iter().flat_map(|view| host(runner, view)).collect());
    found.push(calibration.dense_texts().unwrap().into_iter().flat_map(|view| host(runner, view)).collect());
    found
}

/// The weights of the first block's layers a little smaller, as of a pruned block.
fn smaller(checkpoint: &dyn BlockwiseCheckpoint) -> impl Fn(&str) -> Option<Vec<f32>> {
    let names: Vec<String> =
        checkpoint.block(0, None).unwrap().inputs().iter().flat_map(|i| i.weights.clone()).collect();
    let read = |name: &String| {
        let view = checkpoint.reader().tensor(name).unwrap();
        let values: Vec<f32> = match view.elements::<f32>() {
            Ok(values) => values.to_vec(),
            Err(_) => view.elements::<half::bf16>().unwrap().iter().map(|value| value.to_f32()).collect(),
        };
        (name.clone(), values.into_iter().map(|value| 0.9 * value).collect())
    };
    let values: BTreeMap<String, Vec<f32>> = names.iter().map(read).collect();
    move |name| values.get(name).cloned()
}

#[test]
fn blocks_on_a_gpu_show_what_they_show_on_the_cpu() {
    let device = device();
    let encoder = directory("bert");
    let wide = ["llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3"].map(|f| (f, with_wide_heads(f)));
    let decoders = wide.iter().map(|(family, folder)| (*family, folder.path()));
    for (family, path) in decoders.chain([("bert", encoder.as_path())]) {
        let checkpoint = open_blockwise(path).unwrap();
        let replace = smaller(checkpoint.as_ref());
        let expected = shown(&Host, checkpoint.as_ref(), &replace);
        assert!(expected.iter().flatten().all(|value| value.is_finite()), "{family}");
        let Some(device) = &device else { continue };
        let backend = GpuBackend::new(device).unwrap();
        let found = shown(&GpuRunner::new(&backend), checkpoint.as_ref(), &replace);
        assert_eq!(found.len(), expected.len(), "{family}");
        for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.len(), expected.len(), "{family}, {number}");
            let largest = expected.iter().fold(1e-3f32, |largest, value| largest.max(value.abs()));
            let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max) / largest;
            // NaN fails, too.
            assert!(apart < 1e-3, "{family}, {number}: {apart} of {largest}");
        }
    }
}
