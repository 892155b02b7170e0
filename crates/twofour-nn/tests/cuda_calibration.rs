//! On a device: calibration on the GPU against calibration on the CPU. Without a device the tests skip; with
//! `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

mod support;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use tempfile::TempDir;
use twofour::{
    calibration::StatisticKind,
    file::{Overwrite, PlannedTensor, Reader, StoredDType, Writer},
};
use twofour_cuda::solve::GpuBackend;
use twofour_nn::model::{
    Beside, BlockwiseCheckpoint, Calibration, Gathered as _, GpuRunner, Host, Replace, Runner, States, open_blockwise,
};

use support::device;

/// Elements of a head: fewer the GPU's kernels do not have.
const HEAD: usize = 32;

/// A checkpoint of `TWOFOUR_CHECKPOINTS`, which a machine without the sources sets, or of the sources.
fn directory(name: &str) -> PathBuf {
    let of_sources = || Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints");
    std::env::var_os("TWOFOUR_CHECKPOINTS").map_or_else(of_sources, PathBuf::from).join(name)
}

/// A decoder of a family with heads of [`HEAD`] elements and random weights in f32.
fn with_wide_heads(family: &str) -> TempDir {
    let (from, folder) = (directory(family), tempfile::tempdir().unwrap());
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    let is_gpt2 = family == "gpt2";
    if is_gpt2 {
        config["n_embd"] = 128.into();
    } else {
        config["head_dim"] = HEAD.into();
    }
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    fs::copy(from.join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let heads = |key: &str| config[key].as_u64().unwrap_or(0) as usize * HEAD;
    let shape = |name: &str, shape: &[usize]| -> Vec<usize> {
        let mut shape = shape.to_vec();
        match name {
            _ if is_gpt2 => shape.iter_mut().filter(|n| [16, 48].contains(n)).for_each(|n| *n *= 8),
            _ if name.contains("q_proj") => shape[0] = heads("num_attention_heads"),
            _ if name.contains("k_proj") || name.contains("v_proj") => shape[0] = heads("num_key_value_heads"),
            _ if name.contains("o_proj") && shape.len() == 2 => shape[1] = heads("num_attention_heads"),
            _ if name.contains("q_norm") || name.contains("k_norm") => shape[0] = HEAD,
            _ => {}
        }
        shape
    };
    let reader = Reader::open(&from).unwrap();
    let tensors: Vec<(String, Vec<usize>)> =
        reader.tensors().map(|tensor| (tensor.name.clone(), shape(&tensor.name, &tensor.shape))).collect();
    let planned = tensors.iter().map(|(name, shape)| PlannedTensor::new(name, StoredDType::F32, shape.clone()));
    let path = folder.path().join("model.safetensors");
    let mut writer = Writer::create(path, Overwrite::No, planned.collect::<Vec<_>>(), BTreeMap::new()).unwrap();
    for (index, (name, shape)) in tensors.iter().enumerate() {
        let (mean, deviation) = if shape.len() == 1 { (0.8, 0.3) } else { (0.0, 0.2) };
        let value = |at: usize| mean + deviation * ((at * 7919 + index * 104_729) as f32 * 0.618).sin();
        writer.write_elements(name, &(0..shape.iter().product()).map(value).collect::<Vec<f32>>()).unwrap();
    }
    writer.finish().unwrap();
    folder
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
    calibration = calibration.beside_dense().unwrap().keeping_entry().unwrap();
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
