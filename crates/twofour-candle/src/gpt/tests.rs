//! The model as a whole: gradients, files, inference against the training forward pass.

use std::ops::ControlFlow;

use candle_core::{DType, Device, Tensor};
use half::bf16;
use proptest::prelude::*;
use twofour::file::Overwrite;

use super::{Config, Gpt, Inference, Sampling};
use crate::{
    Result,
    linear::{AnyLinear, HasLinears, SparseSettings, linear_names},
    ops::gradient_check::distance,
};

const SMALL: Config = Config { layers: 2, width: 32, heads: 2, context: 24, feed_forward: 64 };

fn dense() -> Result<Gpt> {
    Gpt::new(&SMALL, 1, &Device::Cpu)
}

/// The same parameters, every block's layers 2:4 and the head dense.
fn sparse() -> Result<Gpt> {
    let mut model = dense()?;
    model.visit_linears(&mut |name, linear| {
        if name != "head" {
            *linear = linear.sparse(SparseSettings::default())?;
        }
        Ok(())
    })?;
    Ok(model)
}

fn bytes(batch: usize, positions: usize, seed: u32) -> Result<Tensor> {
    let all: Vec<u32> = (0..(batch * positions) as u32).map(|i| (i * 37 + seed * 101 + i * i) % 256).collect();
    Ok(Tensor::from_vec(all, (batch, positions), &Device::Cpu)?)
}

fn flat(t: &Tensor) -> Result<Vec<f32>> {
    Ok(t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}

#[test]
fn every_trainable_variable_gets_a_gradient_dense_and_sparse() -> Result<()> {
    for (form, model) in [("dense", dense()?), ("sparse", sparse()?)] {
        let grads = model.backward(&model.loss(&bytes(2, 9, 1)?, &bytes(2, 9, 2)?)?)?;
        let variables = model.variables()?;
        assert_eq!(variables.iter().map(|(_, v)| v.elem_count()).sum::<usize>(), SMALL.parameters());
        for (name, var) in &variables {
            let Some(gradient) = grads.get(var) else { panic!("{form}: `{name}` has no gradient") };
            let largest = flat(gradient)?.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!(largest > 0.0 && largest.is_finite(), "{form}: the gradient of `{name}` is {largest} at most");
        }
    }
    Ok(())
}

#[test]
fn gradients_of_the_whole_model_agree_with_finite_differences() -> Result<()> {
    let model = dense()?;
    let (x, y) = (bytes(1, 6, 3)?, bytes(1, 6, 4)?);
    let grads = model.backward(&model.loss(&x, &y)?)?;
    for (name, var) in model.variables()? {
        let Some(gradient) = grads.get(&var) else { panic!("`{name}` has no gradient") };
        let (values, gradient) = (flat(&var)?, flat(gradient)?);
        // The direction of the gradient: the derivative along it is its norm.
        let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
        // The same relative change of the loss for every variable.
        let step = 1e-2 / norm;
        let along = |by: f32| -> Result<f32> {
            let moved: Vec<f32> = values.iter().zip(&gradient).map(|(v, g)| v + by * g / norm).collect();
            var.set(&Tensor::from_vec(moved, var.shape(), &Device::Cpu)?)?;
            Ok(model.loss(&x, &y)?.to_scalar()?)
        };
        let numeric = (along(step)? - along(-step)?) / (2.0 * step);
        var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
        assert!((numeric - norm).abs() < 0.05 * norm, "`{name}`: {numeric} along a gradient of norm {norm}");
    }
    Ok(())
}

#[test]
fn the_future_does_not_reach_the_past() -> Result<()> {
    let model = dense()?;
    let first = bytes(1, 10, 5)?;
    let changed = Tensor::cat(&[first.narrow(1, 0, 6)?, bytes(1, 4, 9)?], 1)?;
    let (a, b) = (model.forward(&first)?, model.forward(&changed)?);
    assert_eq!(flat(&a.narrow(1, 0, 6)?)?, flat(&b.narrow(1, 0, 6)?)?);
    assert_ne!(flat(&a.narrow(1, 6, 1)?)?, flat(&b.narrow(1, 6, 1)?)?);
    Ok(())
}

#[test]
fn the_same_seed_gives_the_same_model() -> Result<()> {
    let values = |seed| -> Result<Vec<f32>> {
        let model = Gpt::new(&SMALL, seed, &Device::Cpu)?;
        Ok(model.variables()?.iter().map(|(_, v)| flat(v)).collect::<Result<Vec<_>>>()?.concat())
    };
    assert_eq!(values(3)?, values(3)?);
    assert_ne!(values(3)?, values(4)?);
    Ok(())
}

#[test]
fn linear_layers_have_their_names() -> Result<()> {
    let mut model = dense()?;
    let expected: Vec<String> = SMALL.linear_layers().into_iter().map(|(name, ..)| name).collect();
    assert_eq!(linear_names(&mut model)?, expected);
    assert_eq!(expected[..2], ["blocks.0.attn.qkv", "blocks.0.attn.out"]);
    Ok(())
}

/// Scores after the whole text, by the training forward pass.
fn expected_logits(model: &Gpt, text: &[u8]) -> Result<Vec<f32>> {
    let ids: Vec<u32> = text.iter().map(|&b| u32::from(b)).collect();
    let logits = model.forward(&Tensor::from_vec(ids, (1, text.len()), &Device::Cpu)?)?;
    flat(&logits.narrow(1, text.len() - 1, 1)?)
}

#[test]
fn prefill_and_decode_agree_with_the_forward_pass() -> Result<()> {
    let text = b"the two of every four";
    for model in [dense()?, sparse()?] {
        let expected = expected_logits(&model, text)?;
        let inference = Inference::<f32>::new(&model)?;
        for first in [1, 7, text.len()] {
            let mut session = inference.session();
            let mut logits = session.feed(&text[..first])?;
            for byte in &text[first..] {
                logits = session.feed(&[*byte])?;
            }
            let d = distance(&logits, &expected);
            assert!(d < 1e-4, "after a prefill of {first}: {d}");
        }
        let d = distance(&Inference::<bf16>::new(&model)?.session().feed(text)?, &expected);
        assert!(d < 2e-2, "bf16: {d}");
    }
    Ok(())
}

#[test]
fn a_session_takes_what_fits_and_no_more() -> Result<()> {
    let inference = Inference::<f32>::new(&dense()?)?;
    let mut session = inference.session();
    session.feed(&[7; 20])?;
    assert_eq!((session.position(), session.remaining()), (20, 4));
    assert!(session.feed(&[7; 5]).is_err() && session.feed(&[]).is_err());
    session.feed(&[7; 4])?;
    assert!(session.feed(&[7]).is_err());
    Ok(())
}

#[test]
fn generation_is_deterministic_stops_on_request_and_outlives_the_context() -> Result<()> {
    let model = dense()?;
    let text = |prompt: &[u8], count: usize, stop: usize| -> Result<Vec<u8>> {
        let mut text = vec![];
        model.generate(prompt, count, Sampling { temperature: 1.0, seed: 5 }, |byte| {
            text.push(byte);
            if text.len() == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(text)
    };
    let long = text(b"ab", 100, 1000)?;
    assert_eq!((long.len(), &long), (100, &text(b"ab", 100, 1000)?));
    assert_eq!(text(b"ab", 100, 3)?, long[..3]);
    assert_eq!(text(&[b'x'; 300], 5, 1000)?.len(), 5);
    assert_eq!(text(b"", 5, 1000)?.len(), 5);
    assert!(model.generate(b"a", 1, Sampling { temperature: -1.0, seed: 0 }, |_| ControlFlow::Continue(())).is_err());
    Ok(())
}

#[test]
fn files_keep_the_model() -> Result<()> {
    let directory = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
    let text = b"round trip";
    for (name, model) in [("dense", dense()?), ("sparse", sparse()?)] {
        let expected = Inference::<f32>::new(&model)?.session().feed(text)?;
        for (dtype, tolerance) in
            [(twofour::DataType::F32, 1e-5), (twofour::DataType::BF16, 2e-2), (twofour::DataType::F16, 2e-3)]
        {
            let path = directory.path().join(format!("{name}-{dtype}.safetensors"));
            model.save(&path, Overwrite::No, dtype)?;
            assert!(model.save(&path, Overwrite::No, dtype).is_err(), "an existing file was replaced");
            let loaded = Gpt::load(&path)?;
            assert_eq!(loaded.config(), model.config());
            let compressed = loaded.linears().iter().filter(|(_, l)| matches!(l, AnyLinear::Compressed(_))).count();
            assert_eq!(compressed, if name == "sparse" { 8 } else { 0 });
            let d = distance(&Inference::<f32>::new(&loaded)?.session().feed(text)?, &expected);
            assert!(d < tolerance, "{name} {dtype}: {d}");
            let d = distance(&expected_logits(&loaded, text)?, &expected);
            assert!(d < tolerance, "{name} {dtype}, forward: {d}");
        }
    }
    let size = |name: &str| std::fs::metadata(directory.path().join(name)).map(|m| m.len());
    assert!(size("sparse-bf16.safetensors").unwrap_or(0) < size("dense-bf16.safetensors").unwrap_or(0));
    Ok(())
}

/// Writes the sparse model with its blocks' weights quantized to i8 and compressed, as a tool that quantizes would.
fn save_quantized(path: &std::path::Path, model: &Gpt, with_scales: bool) -> Result<()> {
    use twofour::file::{CompressedInfo, Plan, PlannedTensor, Writer};
    let float = path.with_extension("float");
    model.save(&float, Overwrite::No, twofour::DataType::F32)?;
    let source = twofour::file::Reader::open(&float)?;
    let sparse: Vec<_> = source.compressed_weights().cloned().collect();
    let part_of_one = |name: &str| sparse.iter().any(|w| name.starts_with(&w.name));
    let plain: Vec<_> = source.tensors().filter(|t| !part_of_one(&t.name)).cloned().collect();
    let mut plan = Plan::new();
    for t in &plain {
        plan.tensor(PlannedTensor::new(&t.name, t.dtype, t.shape.clone()));
    }
    for weight in &sparse {
        let info = CompressedInfo::new(&weight.name, twofour::DataType::I8, weight.rows, weight.cols)?;
        plan.compressed(if with_scales { info.with_scales()? } else { info });
    }
    let mut writer = Writer::create(path, Overwrite::No, plan, source.metadata().clone())?;
    for t in &plain {
        writer.write(&t.name, &source.tensor(&t.name)?.bytes()?)?;
    }
    for weight in &sparse {
        let dense = source.compressed::<f32>(&weight.name)?.to_dense();
        let matrix = twofour::MatrixRef::new(weight.rows, weight.cols, &dense)?;
        let (values, scales) = twofour::kernel::quantize(matrix)?;
        let values = twofour::MatrixRef::new(weight.rows, weight.cols, &values)?;
        writer.write_compressed(&weight.name, &twofour::Compressed::from_pruned(values)?)?;
        if with_scales {
            writer.write_elements(&twofour::file::Part::Scales.key(&weight.name), &scales)?;
        }
    }
    Ok(writer.finish()?)
}

#[test]
fn quantized_files_are_loaded_and_without_scales_refused() -> Result<()> {
    let directory = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
    let model = sparse()?;
    let path = directory.path().join("i8.safetensors");
    save_quantized(&path, &model, true)?;
    let text = b"round trip";
    let expected = Inference::<f32>::new(&model)?.session().feed(text)?;
    let loaded = Gpt::load(&path)?;
    let d = distance(&Inference::<f32>::new(&loaded)?.session().feed(text)?, &expected);
    assert!(d > 0.0 && d < 3e-2, "{d}");

    let path = directory.path().join("no-scales.safetensors");
    save_quantized(&path, &model, false)?;
    let message = Gpt::load(&path).unwrap_err().to_string();
    assert!(message.contains("blocks.0.attn.qkv") && message.contains("scales"), "{message}");
    Ok(())
}

#[test]
fn compressed_models_are_not_saved_again_and_other_files_are_not_models() -> Result<()> {
    let directory = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
    let path = directory.path().join("model.safetensors");
    sparse()?.save(&path, Overwrite::No, twofour::DataType::BF16)?;
    let error = Gpt::load(&path)?.save(directory.path().join("again"), Overwrite::No, twofour::DataType::F32);
    assert!(error.unwrap_err().to_string().contains("copy the file"));
    assert!(dense()?.save(directory.path().join("i8"), Overwrite::No, twofour::DataType::I8).is_err());

    let other = directory.path().join("other.safetensors");
    let writer = twofour::file::Writer::create(&other, Overwrite::No, vec![], std::collections::BTreeMap::new())?;
    writer.finish()?;
    assert!(Gpt::load(&other).unwrap_err().to_string().contains("twofour.gpt"));
    Ok(())
}

/// The bytes of a small model's file, dense or 2:4.
fn file_bytes(sparse: bool) -> Result<Vec<u8>> {
    let mut model = Gpt::new(&Config { layers: 1, width: 8, heads: 2, context: 8, feed_forward: 8 }, 1, &Device::Cpu)?;
    if sparse {
        model.visit_linears(&mut |_, linear| {
            *linear = linear.sparse(SparseSettings::default())?;
            Ok(())
        })?;
    }
    let directory = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
    let path = directory.path().join("model.safetensors");
    model.save(&path, Overwrite::No, twofour::DataType::BF16)?;
    Ok(std::fs::read(path).map_err(candle_core::Error::wrap)?)
}

/// Loads a file from a stranger and, where it is accepted, writes text with it; whether it was accepted.
fn survives(bytes: Vec<u8>) -> bool {
    let Ok(model) =
        twofour::file::Reader::from_bytes("model", bytes).map_err(Into::into).and_then(|r| Gpt::from_reader(&r))
    else {
        return false;
    };
    model.config().validate().unwrap();
    // A context that was made longer is no damage, but its cache is large.
    if model.config().context <= 4096 {
        let mut text = vec![];
        let inference = Inference::<bf16>::new(&model).unwrap();
        let outcome = inference.generate(b"ab", 3, Sampling::default(), |byte| {
            text.push(byte);
            ControlFlow::Continue(())
        });
        assert!(outcome.is_ok() && text.len() == 3, "{outcome:?}");
    }
    true
}

proptest! {
    /// Bytes changed anywhere, most often in the header, where the sizes and names are.
    #[test]
    fn damaged_files_are_refused_or_work(
        sparse in any::<bool>(),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<bool>(), any::<u8>()), 0..4),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = file_bytes(sparse).unwrap();
        prop_assert!(survives(bytes.clone()));
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (place, in_data, value) in edits {
            let range = if in_data { bytes.len() } else { header };
            bytes[place.index(range)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        survives(bytes);
    }

    /// The sizes replaced by any others: accepted only where every tensor has the shape that they ask for.
    #[test]
    fn other_sizes_are_refused(sizes in proptest::array::uniform5(prop_oneof![Just(1usize), Just(2), Just(8), Just(1 << 20), any::<usize>()])) {
        let bytes = file_bytes(false).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let own: Config = serde_json::from_str(header["__metadata__"]["twofour.gpt"].as_str().unwrap()).unwrap();
        let [layers, width, heads, context, feed_forward] = sizes;
        let other = Config { layers, width, heads, context, feed_forward };
        header["__metadata__"]["twofour.gpt"] = serde_json::to_string(&other).unwrap().into();
        let header = header.to_string();
        let mut changed = (header.len() as u64).to_le_bytes().to_vec();
        changed.extend_from_slice(header.as_bytes());
        changed.extend_from_slice(&bytes[8 + length..]);
        let accepted = survives(changed);
        // Heads and context leave no trace in the shapes.
        let fits = (layers, width, feed_forward) == (own.layers, own.width, own.feed_forward);
        prop_assert_eq!(accepted, fits && other.validate().is_ok());
    }
}
