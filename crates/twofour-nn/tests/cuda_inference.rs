//! On a device: inference on the GPU against inference on the CPU. Without a device the tests skip; with
//! `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

mod support;

use std::{
    collections::BTreeMap,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use twofour::{
    DataType,
    file::{Convert, Overwrite, PlannedTensor, Quantization, Quantize, Reader, StoredDType, Writer},
    int4::Granularity,
    layer::SparseLinearSettings,
};
use twofour_cuda::Device;
use twofour_nn::{
    Error,
    model::{
        AttentionConfig, CudaInference, Decoder, Gpt, GptConfig, Inference, ModelInput, ModelOutput, NormPlace, Rope,
        SampledTexts, Sampling, TokenInput, TransformerConfig, VOCABULARY, Windows,
    },
};
use twofour_transformer::engine::{Nonlinearity, cpu::CpuEngine};

use support::{decoded, device};

const GREEDY: Sampling = Sampling { temperature: 0.0, seed: 0 };

/// A LLaMA of grouped queries, and a GPT with biases, layer normalization and GELU.
fn configs() -> [(&'static str, TransformerConfig); 2] {
    let sizes = GptConfig { layers: 2, width: 128, heads: 4, context: 96, feed_forward: 256 };
    let mut llama = TransformerConfig::llama(&sizes, 2, VOCABULARY);
    llama.attention.qkv_bias = true;
    let gpt = TransformerConfig::from(&sizes);
    [("llama", llama), ("gpt", gpt)]
}

/// Writes a model, dense or with 2:4 blocks, in f32.
fn saved(directory: &Path, name: &str, config: &TransformerConfig, is_sparse: bool) -> PathBuf {
    let mut model = Gpt::new(&CpuEngine, config.clone(), 3).unwrap();
    if is_sparse {
        for linear in model.linears_mut().filter(|linear| linear.name() != "head") {
            linear.make_sparse(&CpuEngine, SparseLinearSettings::default(), 0).unwrap();
        }
    }
    let path = directory.join(format!("{name}-{is_sparse}.safetensors"));
    model.save(&CpuEngine, &path, Overwrite::No, DataType::F32).unwrap();
    path
}

/// A Gemma 3 with the bounds of Gemma 2.
fn gemma() -> TransformerConfig {
    let sizes = GptConfig { layers: 2, width: 128, heads: 4, context: 96, feed_forward: 256 };
    let mut config = TransformerConfig::llama(&sizes, 2, VOCABULARY);
    config.input = ModelInput::Tokens(TokenInput { scale: Some(11.3), ..*config.tokens().unwrap() });
    config.norm.place = NormPlace::Around;
    config.attention = AttentionConfig {
        head_norms: true,
        scale: Some(0.2),
        soft_cap: Some(5.0),
        windows: vec![Some(20), None],
        local_rope: Some(Rope { base: 100.0, scaling: None }),
        ..config.attention
    };
    config.feed_forward.activation = Nonlinearity::TanhGelu;
    config.output = ModelOutput::Vocabulary { tied: true, soft_cap: Some(3.0) };
    config
}

/// Writes a model of random values in f32, without a trainer.
fn written(directory: &Path, name: &str, config: &TransformerConfig) -> PathBuf {
    let matrix = |(name, outputs, inputs): (String, usize, usize)| (format!("{name}.weight"), vec![outputs, inputs]);
    let mut tensors: Vec<(String, Vec<usize>)> = config.linear_layers().into_iter().map(matrix).collect();
    tensors.push(("norm.weight".into(), vec![config.width]));
    for layer in 0..config.layers {
        for norm in ["attn.norm", "attn.post_norm", "mlp.norm", "mlp.post_norm"] {
            tensors.push((format!("blocks.{layer}.{norm}.weight"), vec![config.width]));
        }
        for norm in ["attn.query_norm", "attn.key_norm"] {
            tensors.push((format!("blocks.{layer}.{norm}.weight"), vec![config.attention.head_dim]));
        }
    }
    let path = directory.join(format!("{name}.safetensors"));
    let metadata = BTreeMap::from([("twofour.decoder".to_owned(), serde_json::to_string(config).unwrap())]);
    let planned = tensors.iter().map(|(name, shape)| PlannedTensor::new(name, StoredDType::F32, shape.clone()));
    let mut writer = Writer::create(&path, Overwrite::No, planned.collect::<Vec<_>>(), metadata).unwrap();
    for (index, (name, shape)) in tensors.iter().enumerate() {
        let (mean, deviation) = if shape.len() == 1 { (1.0, 0.3) } else { (0.0, 0.1) };
        let value = |at: usize| mean + deviation * ((at * 7919 + index * 104_729) as f32 * 0.618).sin();
        writer.write_elements(name, &(0..shape.iter().product()).map(value).collect::<Vec<f32>>()).unwrap();
    }
    writer.finish().unwrap();
    path
}

/// The same 2:4 weights in integers.
fn quantized(path: &Path, to: Quantization) -> PathBuf {
    let output = path.with_extension(match to {
        Quantization::Int8(_) => "int8.safetensors",
        _ => "int4.safetensors",
    });
    let quantize = Quantize {
        which: &|name, _, _| name.starts_with("blocks."),
        to,
        dense: &|_, _, _| false,
        rule: twofour::quantization::ScaleRule::MaxAbs,
    };
    Convert::open(path).unwrap().run(&output, quantize).unwrap();
    output
}

fn text(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + i * i * 11) % 256).collect()
}

/// The CPU's scores after a text, and how large they are.
fn expected(path: &Path, dtype: DataType, tokens: &[u32]) -> (Vec<f32>, f32) {
    let scores = match dtype {
        DataType::F32 => Inference::<f32>::load(path).unwrap().session().feed(tokens).unwrap(),
        DataType::F16 => Inference::<f16>::load(path).unwrap().session().feed(tokens).unwrap(),
        _ => Inference::<bf16>::load(path).unwrap().session().feed(tokens).unwrap(),
    };
    let size = scores.iter().fold(0f32, |most, score| most.max(score.abs()));
    (scores, size)
}

fn greedy(model: &dyn Decoder, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = vec![];
    let push = &mut |token| {
        tokens.push(token);
        ControlFlow::Continue(())
    };
    model.generate(prompt, count, GREEDY, push).unwrap();
    tokens
}

/// Checks scores after a prefill and after decoding tokens one by one.
fn check(device: &Device, path: &Path, dtype: DataType, tolerance: f32) {
    let what = format!("{} in {dtype}", path.file_name().unwrap().to_string_lossy());
    let model = CudaInference::from_reader(device, &Reader::open(path).unwrap(), dtype).unwrap();
    let tokens = text(70);
    let (expected, size) = expected(path, dtype, &tokens);
    for first in [70, 69, 1] {
        let mut session = model.session(2, 96).unwrap();
        session.prefill(1, &tokens[..first]).unwrap();
        for token in &tokens[first..] {
            session.prefill(1, &[*token]).unwrap();
        }
        let found = session.scores(1).unwrap();
        let d = found
            .iter()
            .zip(&expected)
            .fold(0f32, |most, (a, b)| if a.is_nan() { f32::NAN } else { most.max((a - b).abs()) });
        assert!(d <= tolerance * size, "{what}, a prefill of {first}: scores up to {size} differ by {d}");
    }
}

#[test]
fn scores_and_perplexity_of_a_gemma_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = written(directory.path(), "gemma", &gemma());
    check(&device, &path, DataType::F32, 1e-4);
    check(&device, &path, DataType::F16, 2e-2);
    check(&device, &path, DataType::BF16, 8e-2);
    let (tokens, windows) = (text(300), Windows { window: 90, stride: 40, begin: None });
    let cpu = Inference::<f32>::load(&path).unwrap();
    let expected = cpu.perplexity(&tokens, windows, |_, _| {}).unwrap();
    let model = CudaInference::from_reader(&device, &Reader::open(&path).unwrap(), DataType::F32).unwrap();
    let found = Decoder::perplexity(&model, &tokens, windows, &mut |_, _| {}).unwrap();
    assert!((found.perplexity / expected.perplexity - 1.0).abs() < 1e-3, "{found:?} {expected:?}");
    assert_eq!(greedy(&model, &tokens[..20], 40), greedy(&cpu, &tokens[..20], 40));
}

#[test]
fn scores_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    let directory = tempfile::tempdir().unwrap();
    for (name, config) in configs() {
        let dense = saved(directory.path(), name, &config, false);
        let sparse = saved(directory.path(), name, &config, true);
        for path in [&dense, &sparse] {
            check(&device, path, DataType::F32, 1e-4);
            check(&device, path, DataType::F16, 1e-2);
            check(&device, path, DataType::BF16, 6e-2);
        }
        // The CPU quantizes the inputs of both, the GPU those of int8.
        check(&device, &quantized(&sparse, Quantization::Int8(Granularity::Row)), DataType::F16, 4e-2);
        check(&device, &quantized(&sparse, Quantization::Int4(Granularity::Group)), DataType::F16, 4e-2);
    }
}

#[test]
fn greedy_texts_in_f32_and_perplexity_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    let directory = tempfile::tempdir().unwrap();
    for (name, config) in configs() {
        let path = saved(directory.path(), name, &config, false);
        let reader = Reader::open(&path).unwrap();
        let (cpu, gpu) = (
            Inference::<f32>::load(&path).unwrap(),
            CudaInference::from_reader(&device, &reader, DataType::F32).unwrap(),
        );
        // Within the context, to its end, and beyond it.
        for (prompt, count) in [(1, 20), (40, 56), (90, 60), (200, 5)] {
            let prompt = text(prompt);
            assert_eq!(greedy(&gpu, &prompt, count), greedy(&cpu, &prompt, count), "{name} after {}", prompt.len());
        }
        let (tokens, windows) = (text(300), Windows { window: 64, stride: 40, begin: Some(1) });
        let [cpu, gpu]: [&dyn Decoder; 2] = [&cpu, &gpu];
        let [cpu, gpu] = [cpu, gpu].map(|model| model.perplexity(&tokens, windows, &mut |_, _| {}).unwrap());
        assert_eq!(cpu.tokens, gpu.tokens);
        assert!((cpu.perplexity / gpu.perplexity - 1.0).abs() < 1e-3, "{name}: {cpu:?}, {gpu:?}");
    }
}

#[test]
fn a_replayed_graph_has_the_bits_of_launched_calls_and_a_full_cache_is_an_error() {
    let Some(device) = device() else { return };
    let directory = tempfile::tempdir().unwrap();
    let (name, config) = &configs()[0];
    let sparse = saved(directory.path(), name, config, true);
    let dense = saved(directory.path(), name, config, false);
    let [int8, int4] =
        [Quantization::Int8(Granularity::Row), Quantization::Int4(Granularity::Group)].map(|to| quantized(&sparse, to));
    for path in [dense, sparse, int8, int4] {
        let model = CudaInference::from_reader(&device, &Reader::open(&path).unwrap(), DataType::BF16).unwrap();
        let run = |launched: bool| {
            let (all, mut session) = decoded(&model, text, (72, launched));
            let error = session.decode().unwrap_err();
            assert!(matches!(error, Error::Setting { .. }), "{error}");
            all
        };
        assert!(run(true) == run(false));
    }
}

#[test]
fn sequences_of_a_batch_are_those_alone() {
    let Some(device) = device() else { return };
    let directory = tempfile::tempdir().unwrap();
    let (name, config) = &configs()[0];
    let path = saved(directory.path(), name, config, false);
    let model = CudaInference::from_reader(&device, &Reader::open(&path).unwrap(), DataType::F32).unwrap();
    let prompts = [text(5), text(33), text(12), text(64)];
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let texts = model.generate_batch(&prompts, 30).unwrap();
    for (prompt, found) in prompts.iter().zip(texts) {
        assert_eq!(found, greedy(&model, prompt, 30), "after {}", prompt.len());
    }
}

#[test]
fn models_that_kernels_do_not_have_are_refused() {
    let Some(device) = device() else { return };
    let directory = tempfile::tempdir().unwrap();
    let (_, config) = &configs()[0];
    let mut narrow = config.clone();
    (narrow.attention.head_dim, narrow.attention.heads, narrow.attention.kv_heads) = (16, 8, 8);
    let path = saved(directory.path(), "narrow", &narrow, false);
    let error = CudaInference::from_reader(&device, &Reader::open(&path).unwrap(), DataType::F32).unwrap_err();
    assert!(error.to_string().contains("heads of 16 elements"), "{error}");
}

#[test]
fn texts_that_are_written_at_once_are_the_most_likely_ones_and_their_seeds_tell_them_apart() {
    let Some(device) = device() else { return };
    let directory = tempfile::tempdir().unwrap();
    let (name, config) = configs()[0].clone();
    let path = saved(directory.path(), name, &config, false);
    let model = CudaInference::from_reader(&device, &Reader::open(&path).unwrap(), DataType::F32).unwrap();
    let prompt = [3u32, 200, 7];
    let written = |temperature: f32| {
        let sampling = Sampling { temperature, seed: 5 };
        let texts = SampledTexts { prompt: &prompt, count: 130, length: 20, sampling };
        model.sample(&texts, &mut |_| Ok(())).unwrap()
    };
    let greedy = model.generate_batch(&[&prompt], 17).unwrap().remove(0);
    assert!(written(0.0).iter().all(|text| text[..3] == prompt && text[3..] == greedy));
    let texts = written(1.0);
    assert!(texts.len() == 130 && texts.iter().all(|text| text.len() == 20) && texts[0] != texts[1]);
    assert_eq!(texts, written(1.0));
}
