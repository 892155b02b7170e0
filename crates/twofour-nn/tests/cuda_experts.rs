//! On a device: decoders of experts on the GPU against the CPU. Without a device the tests skip; with
//! `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

mod support;

use std::{fs, ops::ControlFlow, path::Path};

use half::{bf16, f16};
use serde_json::Value;
use tempfile::TempDir;
use twofour::{
    DataType,
    file::{Convert, Quantization, Quantize},
    int4::Granularity,
    quantization::ScaleRule,
};
use twofour_cuda::{Device, solve::GpuBackend};
use twofour_nn::{
    Error,
    model::{Calibration, Checkpoint, CudaInference, Decoder, GpuRunner, Sampling, Windows, open_blockwise},
};

use support::{
    checkpoints::{self, HEAD, scattered},
    decoded, device,
};

const FAMILIES: [&str; 5] = ["mixtral", "mixtral_joined", "qwen2_moe", "qwen3_moe", "gpt_oss"];

/// The longest text: more tokens than go through the layers at once.
const CONTEXT: usize = 700;

/// Sizes of the sources' checkpoints, and larger ones that all kernels have.
const SIZES: [(usize, usize); 5] = [(16, 128), (24, 192), (48, 384), (12, 96), (20, 160)];

fn larger(size: usize) -> usize {
    SIZES.iter().find(|(small, _)| *small == size).map_or(size, |(_, large)| *large)
}

fn is_router(name: &str) -> bool {
    ["moe.gate.weight", "mlp.gate.weight", "router.weight"].iter().any(|end| name.ends_with(end))
}

/// A decoder of a family with random weights, which `edit` may change by name and shape.
fn model(family: &str, edit: impl Fn(&str, &[usize], &mut [f32])) -> TempDir {
    let change = |config: &mut Value| {
        for size in ["hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"] {
            if let Some(small) = config.get(size).and_then(Value::as_u64) {
                config[size] = larger(small as usize).into();
            }
        }
        config["head_dim"] = HEAD.into();
        config["max_position_embeddings"] = CONTEXT.into();
    };
    checkpoints::rewritten(family, change, |config, index, name, shape| {
        let larger: Vec<usize> = shape.iter().map(|size| larger(*size)).collect();
        let shape = checkpoints::with_wide_heads(config, name, &larger);
        let mut values: Vec<f32> = (0..shape.iter().product()).map(|at| scattered(index, &shape, at)).collect();
        if is_router(name) {
            // Scores far from each other: rounding changes no choice.
            values.iter_mut().for_each(|value| *value *= 5.0);
        }
        edit(name, &shape, &mut values);
        (shape, values)
    })
}

fn dense(family: &str) -> TempDir {
    model(family, |_, _, _| ())
}

/// A decoder whose experts and attention are 2:4.
fn sparse(family: &str) -> TempDir {
    model(family, |name, _, values| {
        if is_linear(name) {
            for group in values.chunks_exact_mut(4) {
                let mut order = [0, 1, 2, 3];
                order.sort_by(|a, b| group[*a].abs().total_cmp(&group[*b].abs()));
                order[..2].iter().for_each(|at| group[*at] = 0.0);
            }
        }
    })
}

/// Whether a tensor is a weight of experts or attention.
fn is_linear(name: &str) -> bool {
    name.ends_with(".weight") && ["proj", "w1", "w2", "w3"].iter().any(|part| name.contains(part))
}

/// The same 2:4 weights in integers.
fn quantized(folder: &Path, to: Quantization) -> TempDir {
    let output = tempfile::tempdir().unwrap();
    let quantize =
        Quantize { which: &|name, _, _| is_linear(name), to, dense: &|_, _, _| false, rule: ScaleRule::MaxAbs };
    let convert = Convert::open(folder.join("model.safetensors")).unwrap();
    convert.run(output.path().join("model.safetensors"), quantize).unwrap();
    for file in ["config.json", "tokenizer.json"] {
        fs::copy(folder.join(file), output.path().join(file)).unwrap();
    }
    output
}

fn text(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + i * i * 11) % 80).collect()
}

/// The CPU's scores after a text.
fn scores(checkpoint: &Checkpoint, dtype: DataType, tokens: &[u32]) -> Vec<f32> {
    match dtype {
        DataType::F32 => checkpoint.inference::<f32>().unwrap().session().feed(tokens).unwrap(),
        DataType::F16 => checkpoint.inference::<f16>().unwrap().session().feed(tokens).unwrap(),
        _ => checkpoint.inference::<bf16>().unwrap().session().feed(tokens).unwrap(),
    }
}

/// The largest difference, by the largest of what is expected; infinite where there is a NaN.
fn apart(found: &[f32], expected: &[f32]) -> f32 {
    let size = expected.iter().fold(0f32, |most, value| most.max(value.abs()));
    let most = |most: f32, (a, b): (&f32, &f32)| if (a - b).is_nan() { f32::INFINITY } else { most.max((a - b).abs()) };
    found.iter().zip(expected).fold(0f32, most) / size
}

/// Checks scores after a prefill and after decoding tokens one by one; the CPU's own are finite and not far from those
/// in f32.
fn check(device: Option<&Device>, what: &str, folder: &Path, types: &[(DataType, f32)]) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let tokens = text(70);
    let exact = scores(&checkpoint, DataType::F32, &tokens);
    for &(dtype, tolerance) in types {
        let expected = scores(&checkpoint, dtype, &tokens);
        let rounding = apart(&expected, &exact);
        assert!(rounding <= tolerance, "{what} in {dtype} on the CPU: {rounding}");
        let Some(device) = device else { continue };
        let model = CudaInference::of_checkpoint(device, &checkpoint, dtype).unwrap();
        for first in [70, 67, 1] {
            let mut session = model.session(2, 96).unwrap();
            session.prefill(1, &tokens[..first]).unwrap();
            for token in &tokens[first..] {
                session.prefill(1, &[*token]).unwrap();
            }
            let apart = apart(&session.scores(1).unwrap(), &expected);
            assert!(apart <= tolerance, "{what} in {dtype}, a prefill of {first}: {apart}");
        }
    }
}

fn greedy(model: &dyn Decoder, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = vec![];
    let push = &mut |token| {
        tokens.push(token);
        ControlFlow::Continue(())
    };
    model.generate(prompt, count, Sampling { temperature: 0.0, seed: 0 }, push).unwrap();
    tokens
}

#[test]
fn scores_of_models_of_experts_are_those_of_the_cpu() {
    let device = device();
    for family in FAMILIES {
        let folder = dense(family);
        let types = [(DataType::F32, 1e-4), (DataType::F16, 1e-2), (DataType::BF16, 6e-2)];
        check(device.as_ref(), family, folder.path(), &types);
    }
}

#[test]
fn scores_of_experts_that_are_2_to_4_in_floats_and_integers_are_those_of_the_cpu() {
    let device = device();
    for family in ["mixtral", "qwen2_moe"] {
        let folder = sparse(family);
        let types = [(DataType::F32, 1e-4), (DataType::F16, 1e-2), (DataType::BF16, 6e-2)];
        check(device.as_ref(), &format!("2:4 {family}"), folder.path(), &types);
        for to in [Quantization::Int8(Granularity::Row), Quantization::Int4(Granularity::Group)] {
            let folder = quantized(folder.path(), to);
            // The CPU quantizes the inputs of both, the GPU those of int8.
            check(device.as_ref(), &format!("{to:?} {family}"), folder.path(), &[(DataType::F16, 6e-2)]);
        }
    }
}

#[test]
fn texts_and_perplexity_in_f32_are_those_of_the_cpu_alone_and_in_a_batch() {
    let Some(device) = device() else { return };
    for family in FAMILIES {
        let folder = dense(family);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let cpu = checkpoint.inference::<f32>().unwrap();
        // One token, several, and more than go through the layers at once.
        let prompts = [text(1), text(40), text(13), text(600)];
        let written: Vec<Vec<u32>> = prompts.iter().map(|prompt| greedy(&cpu, prompt, 12)).collect();
        let (tokens, windows) = (text(200), Windows { window: 64, stride: 40, begin: Some(1) });
        let expected = Decoder::perplexity(&cpu, &tokens, windows, &mut |_, _| {}).unwrap();
        let gpu = CudaInference::of_checkpoint(&device, &checkpoint, DataType::F32).unwrap();
        for (prompt, expected) in prompts.iter().zip(&written) {
            assert_eq!(greedy(&gpu, prompt, 12), *expected, "{family} after {}", prompt.len());
        }
        let batch: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        assert_eq!(gpu.generate_batch(&batch, 12).unwrap(), written, "{family}");
        let found = Decoder::perplexity(&gpu, &tokens, windows, &mut |_, _| {}).unwrap();
        assert!((found.perplexity / expected.perplexity - 1.0).abs() < 1e-3, "{family}: {found:?}, {expected:?}");
    }
}

/// The first feature of the residual stream is one number, by which the router chooses: the first expert always, the
/// second never.
#[test]
fn an_expert_of_all_tokens_and_one_of_none_compute_what_they_do_on_the_cpu() {
    let device = device();
    let uneven = |is_second_nan: bool| {
        model("mixtral", move |name, shape, values| {
            let columns = shape.last().copied().unwrap_or(1);
            match name {
                _ if name.contains("embed_tokens") => values.iter_mut().step_by(columns).for_each(|value| *value = 4.0),
                // No block adds to the first feature.
                _ if name.contains("o_proj") || name.contains("w2") => values[..columns].fill(0.0),
                _ if is_router(name) => {
                    values.iter_mut().for_each(|value| *value *= 0.01);
                    (values[0], values[columns]) = (30.0, -30.0);
                }
                _ => {}
            }
            if is_second_nan && name.contains("experts.1.") {
                values.fill(f32::NAN);
            }
        })
    };
    let (whole, damaged) = (uneven(false), uneven(true));
    check(device.as_ref(), "uneven experts", whole.path(), &[(DataType::F32, 1e-4), (DataType::BF16, 6e-2)]);
    // No token reads the second expert.
    check(device.as_ref(), "an expert of NaN", damaged.path(), &[(DataType::F32, 1e-4), (DataType::BF16, 6e-2)]);
}

/// The host chooses experts, so no step is replayed.
#[test]
fn decoding_has_the_bits_of_launched_steps() {
    let Some(device) = device() else { return };
    let folder = dense("qwen2_moe");
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let model = CudaInference::of_checkpoint(&device, &checkpoint, DataType::BF16).unwrap();
    let run = |launched: bool| decoded(&model, text, (40, launched)).0;
    assert!(run(true) == run(false));
}

#[test]
fn calibration_of_experts_on_a_gpu_is_refused_with_what_to_do() {
    let folder = dense("mixtral");
    let checkpoint = open_blockwise(folder.path()).unwrap();
    let Some(device) = device() else { return };
    let runner = GpuRunner::new(&GpuBackend::new(&device).unwrap());
    let error = Calibration::on(&runner, checkpoint.as_ref(), &[text(8)]).and_then(|calibration| {
        calibration.preview(usize::MAX, &mut |_, _| {})?;
        calibration.inputs().map(|_| ())
    });
    assert!(matches!(&error, Err(Error::Unsupported { remedy: "calibrate on the CPU", .. })), "{error:?}");
}
