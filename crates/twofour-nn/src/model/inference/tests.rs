//! Inference against the training forward pass, and models from files.

use std::{ops::ControlFlow, path::Path};

use half::bf16;
use proptest::prelude::*;
use twofour::{
    Compressed, DataType, MatrixRef,
    file::{CompressedInfo, Overwrite, Part, Plan, PlannedTensor, Reader, Writer},
    kernel::quantize,
    layer::SparseLinearSettings,
};

use super::{Inference, Sampling};
use crate::{
    Error,
    block::BatchShape,
    engine::cpu::CpuEngine,
    model::{Gpt, GptConfig, TransformerConfig},
};

const ENGINE: CpuEngine = CpuEngine;
const SMALL: GptConfig = GptConfig { layers: 2, width: 32, heads: 2, context: 24, feed_forward: 64 };

fn dense() -> Gpt<CpuEngine> {
    Gpt::new(&ENGINE, &SMALL, 1).unwrap()
}

/// The same parameters, every block's layers 2:4 and the head dense.
fn sparse() -> Gpt<CpuEngine> {
    sparse_of(dense())
}

fn sparse_of(mut model: Gpt<CpuEngine>) -> Gpt<CpuEngine> {
    for linear in model.linears_mut().filter(|linear| linear.name() != "head") {
        linear.make_sparse(&ENGINE, SparseLinearSettings::default(), 0).unwrap();
    }
    model
}

fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0f32, |m, (a, b)| {
        let d = (a - b).abs();
        if d.is_nan() { f32::INFINITY } else { m.max(d) }
    })
}

/// Scores after the whole text, by the training forward pass.
fn expected_logits(model: &mut Gpt<CpuEngine>, text: &[u8]) -> Vec<f32> {
    let logits = model.logits(&ENGINE, &tokens(text), BatchShape { batch: 1, positions: text.len() }).unwrap();
    logits[(text.len() - 1) * 256..].to_vec()
}

fn tokens(text: &[u8]) -> Vec<u32> {
    text.iter().map(|&byte| byte.into()).collect()
}

fn logits_of(model: &Inference<f32>, text: &[u8]) -> Vec<f32> {
    model.session().feed(&tokens(text)).unwrap()
}

#[test]
fn prefill_and_decode_agree_with_the_forward_pass() {
    let text = b"the two of every four";
    let tokens = tokens(text);
    for mut model in [dense(), sparse()] {
        let expected = expected_logits(&mut model, text);
        let inference = Inference::<f32>::new(&ENGINE, &model).unwrap();
        for first in [1, 7, text.len()] {
            let mut session = inference.session();
            let mut logits = session.feed(&tokens[..first]).unwrap();
            for token in &tokens[first..] {
                logits = session.feed(&[*token]).unwrap();
            }
            let d = distance(&logits, &expected);
            assert!(d < 1e-4, "after a prefill of {first}: {d}");
        }
        let narrow = Inference::<bf16>::new(&ENGINE, &model).unwrap();
        let d = distance(&narrow.session().feed(&tokens).unwrap(), &expected);
        assert!(d < 2e-2, "bf16: {d}");
    }
}

#[test]
fn packed_weights_of_a_sparse_model_are_smaller() {
    let [dense, sparse] = [dense(), sparse()].map(|model| Inference::<f32>::new(&ENGINE, &model).unwrap());
    let head = 256 * 32 * 4;
    assert_eq!((dense.weight_bytes() - head) * 17, (sparse.weight_bytes() - head) * 32);
    assert_eq!(*sparse.config(), TransformerConfig::from(&SMALL));
}

#[test]
fn a_session_takes_what_fits_and_no_more() {
    let inference = Inference::<f32>::new(&ENGINE, &dense()).unwrap();
    let mut session = inference.session();
    session.feed(&[7; 20]).unwrap();
    assert_eq!((session.position(), session.remaining()), (20, 4));
    assert!(session.feed(&[7; 5]).is_err() && session.feed(&[]).is_err());
    session.feed(&[7; 4]).unwrap();
    assert!(session.feed(&[7]).is_err());
}

#[test]
fn generation_is_deterministic_stops_on_request_and_outlives_the_context() {
    let model = Inference::<f32>::new(&ENGINE, &dense()).unwrap();
    let text = |prompt: &[u8], count: usize, stop: usize| {
        let mut text = vec![];
        let sampling = Sampling { temperature: 1.0, seed: 5 };
        let generated = model.generate(&tokens(prompt), count, sampling, |token| {
            text.push(token);
            if text.len() == stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        generated.unwrap();
        text
    };
    let long = text(b"ab", 100, 1000);
    assert_eq!((long.len(), &long), (100, &text(b"ab", 100, 1000)));
    assert_eq!(text(b"ab", 100, 3), long[..3]);
    assert_eq!(text(&[b'x'; 300], 5, 1000).len(), 5);
    let bad = Sampling { temperature: -1.0, seed: 0 };
    assert!(model.generate(&[97], 1, bad, |_| ControlFlow::Continue(())).is_err());
    assert!(model.generate(&[], 1, Sampling::default(), |_| ControlFlow::Continue(())).is_err());
}

#[test]
fn files_are_run_as_they_are_stored() {
    let directory = tempfile::tempdir().unwrap();
    let text = b"round trip";
    for (name, model) in [("dense", dense()), ("sparse", sparse())] {
        let expected = logits_of(&Inference::new(&ENGINE, &model).unwrap(), text);
        for (dtype, tolerance) in [(DataType::F32, 1e-5), (DataType::BF16, 2e-2), (DataType::F16, 2e-3)] {
            let path = directory.path().join(format!("{name}-{dtype}.safetensors"));
            model.save(&ENGINE, &path, Overwrite::No, dtype).unwrap();
            let loaded = Inference::<f32>::load(&path).unwrap();
            let d = distance(&logits_of(&loaded, text), &expected);
            assert!(d < tolerance, "{name} {dtype}: {d}");
            if name == "sparse" && dtype != DataType::F32 {
                // Compressed weights stay in the file's type: 9 bytes of each 16, of half the size.
                let (head, all) = (256 * 32 * 4, 2 * (3 * 32 * 32 + 32 * 32 + 2 * 64 * 32));
                assert_eq!(loaded.weight_bytes(), head + all * 2 * 9 / 16, "{dtype}");
            }
            // Loaded for training, the same model is dense.
            let mut trained = Gpt::load(&ENGINE, &path).unwrap();
            let d = distance(&expected_logits(&mut trained, text), &expected);
            assert!(d < tolerance, "{name} {dtype}, forward: {d}");
        }
    }
}

/// Writes the sparse model with its blocks' weights quantized to i8 and compressed, as a tool that quantizes would.
fn save_quantized(path: &Path, model: &Gpt<CpuEngine>, with_scales: bool) {
    let float = path.with_extension("float");
    model.save(&ENGINE, &float, Overwrite::No, DataType::F32).unwrap();
    let source = Reader::open(&float).unwrap();
    let sparse: Vec<_> = source.compressed_weights().cloned().collect();
    let part_of_one = |name: &str| sparse.iter().any(|w| name.starts_with(&w.name));
    let plain: Vec<_> = source.tensors().filter(|t| !part_of_one(&t.name)).cloned().collect();
    let mut plan = Plan::new();
    for t in &plain {
        plan.tensor(PlannedTensor::new(&t.name, t.dtype, t.shape.clone()));
    }
    for weight in &sparse {
        let info = CompressedInfo::new(&weight.name, DataType::I8, weight.rows, weight.cols).unwrap();
        plan.compressed(if with_scales { info.with_scales().unwrap() } else { info });
    }
    let mut writer = Writer::create(path, Overwrite::No, plan, source.metadata().clone()).unwrap();
    for t in &plain {
        writer.write(&t.name, &source.tensor(&t.name).unwrap().bytes().unwrap()).unwrap();
    }
    for weight in &sparse {
        let dense = source.compressed::<f32>(&weight.name).unwrap().to_dense();
        let matrix = MatrixRef::new(weight.rows, weight.cols, &dense).unwrap();
        let (values, scales) = quantize(matrix).unwrap();
        let values = MatrixRef::new(weight.rows, weight.cols, &values).unwrap();
        writer.write_compressed(&weight.name, &Compressed::from_pruned(values).unwrap()).unwrap();
        if with_scales {
            writer.write_elements(&Part::Scales.key(&weight.name), &scales).unwrap();
        }
    }
    writer.finish().unwrap();
}

#[test]
fn quantized_files_are_loaded_and_without_scales_refused() {
    let directory = tempfile::tempdir().unwrap();
    let model = sparse();
    let path = directory.path().join("i8.safetensors");
    save_quantized(&path, &model, true);
    let text = b"round trip";
    let expected = logits_of(&Inference::new(&ENGINE, &model).unwrap(), text);
    let d = distance(&logits_of(&Inference::load(&path).unwrap(), text), &expected);
    assert!(d > 0.0 && d < 3e-2, "{d}");
    // For training the weights are dequantized.
    let d = distance(&expected_logits(&mut Gpt::load(&ENGINE, &path).unwrap(), text), &expected);
    assert!(d > 0.0 && d < 3e-2, "dequantized: {d}");

    let path = directory.path().join("no-scales.safetensors");
    save_quantized(&path, &model, false);
    let message = Inference::<f32>::load(&path).unwrap_err().to_string();
    assert!(message.contains("blocks.0.attn.qkv") && message.contains("scales"), "{message}");
    let message = Gpt::load(&ENGINE, &path).unwrap_err().to_string();
    assert!(message.contains("blocks.0.attn.qkv") && message.contains("scales"), "{message}");
}

#[test]
fn other_files_are_not_models() {
    let directory = tempfile::tempdir().unwrap();
    let other = directory.path().join("other.safetensors");
    Writer::create(&other, Overwrite::No, vec![], std::collections::BTreeMap::new()).unwrap().finish().unwrap();
    assert!(Inference::<f32>::load(&other).unwrap_err().to_string().contains("twofour.gpt"));
    assert!(Gpt::load(&ENGINE, &other).unwrap_err().to_string().contains("twofour.gpt"));
}

/// The bytes of a small model's file, dense or 2:4.
fn file_bytes(is_sparse: bool) -> Vec<u8> {
    let config = GptConfig { layers: 1, width: 8, heads: 2, context: 8, feed_forward: 8 };
    let dense = Gpt::new(&ENGINE, &config, 1).unwrap();
    let model = if is_sparse { sparse_of(dense) } else { dense };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    model.save(&ENGINE, &path, Overwrite::No, DataType::BF16).unwrap();
    std::fs::read(path).unwrap()
}

/// Loads a file from a stranger and, where it is accepted, writes text with it, unless its weights give scores that are
/// not finite; whether it was accepted.
fn survives(bytes: Vec<u8>) -> bool {
    let Ok(reader) = Reader::from_bytes("model", bytes) else { return false };
    // For training it is refused or read, too.
    let trained = Gpt::from_reader(&ENGINE, &reader);
    let Ok(inference) = Inference::<bf16>::from_reader(&reader) else { return false };
    assert_eq!(trained.unwrap().config(), inference.config());
    inference.config().validate().unwrap();
    let mut text = vec![];
    let outcome = inference.generate(&tokens(b"ab"), 3, Sampling::default(), |token| {
        text.push(token);
        ControlFlow::Continue(())
    });
    match outcome {
        Ok(()) => assert_eq!(text.len(), 3),
        outcome => assert!(matches!(outcome, Err(Error::NotFinite { .. })), "{outcome:?}"),
    }
    true
}

/// Sizes near those of a model, and any others.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1usize), Just(2), Just(8), Just(1 << 20), any::<usize>()]
}

proptest! {
    /// Bytes changed anywhere, most often in the header, where the sizes and names are.
    #[test]
    fn damaged_files_are_refused_or_work(
        sparse in any::<bool>(),
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<bool>(), any::<u8>()), 0..4),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = file_bytes(sparse);
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
    fn other_sizes_are_refused(sizes in proptest::array::uniform5(size())) {
        let bytes = file_bytes(false);
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let own: GptConfig = serde_json::from_str(header["__metadata__"]["twofour.gpt"].as_str().unwrap()).unwrap();
        let [layers, width, heads, context, feed_forward] = sizes;
        let other = GptConfig { layers, width, heads, context, feed_forward };
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
