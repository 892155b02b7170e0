//! On a device: encoders of text on the GPU against the same on the CPU. Without a device the tests skip; with
//! `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

mod support;

use std::{fs, path::Path};

use twofour::{
    DataType, Selector,
    file::{Compress, Convert, Prune, TensorInfo},
};
use twofour_nn::model::{CudaEncoder, EncoderCheckpoint, EncoderInput, MaskedEncoder, SentenceEncoder};

use support::{checkpoints::directory, device, distance};

/// The same checkpoint with other weights.
fn converted(from: &Path, convert: impl FnOnce(&Path)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json"] {
        fs::copy(from.join(file), folder.path().join(file)).unwrap();
    }
    convert(&folder.path().join("model.safetensors"));
    folder
}

#[test]
fn hidden_states_of_sequences_of_any_length_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    let is_linear = |name: &str| name.contains("layer.") && name.ends_with("weight") && !name.contains("LayerNorm");
    let dense = directory("bert");
    let which = |tensor: &TensorInfo| is_linear(&tensor.name).then_some(Selector::TWO_FOUR);
    let pruned = converted(&dense, |to| drop(Convert::open(&dense).unwrap().run(to, Prune::new(&which)).unwrap()));
    let options = Compress { which: &|tensor| is_linear(&tensor.name), ..Default::default() };
    let small = converted(&dense, |to| drop(Convert::open(pruned.path()).unwrap().run(to, options).unwrap()));
    // Lengths that are alike, others, the context and one token; with types and without.
    let lengths = [7, 7, 40, 1, 23];
    let tokens: Vec<Vec<u32>> = lengths.iter().map(|len| (0..*len).map(|i| (i * i + len) % 80).collect()).collect();
    let types: Vec<u32> = (0..40).map(|i| u32::from(i > 17)).collect();
    let input = |(index, tokens): (usize, &'_ Vec<u32>)| (index % 2 == 0).then(|| types[..tokens.len()].to_vec());
    let types: Vec<Option<Vec<u32>>> = tokens.iter().enumerate().map(input).collect();
    let inputs: Vec<EncoderInput<'_>> =
        tokens.iter().zip(&types).map(|(tokens, types)| EncoderInput { tokens, types: types.as_deref() }).collect();
    for path in [dense.as_path(), pruned.path(), small.path()] {
        let checkpoint = EncoderCheckpoint::open(path).unwrap();
        let expected = checkpoint.inference::<f32>().unwrap().forward(&inputs).unwrap();
        for (dtype, tolerance) in [(DataType::F32, 1e-3), (DataType::F16, 0.03), (DataType::BF16, 0.2)] {
            let encoder = CudaEncoder::of_checkpoint(&device, &checkpoint, dtype).unwrap();
            let found = encoder.forward(&inputs).unwrap();
            let d = distance(&found, &expected);
            assert!(d < tolerance, "{} {dtype}: {d}", path.display());
            assert!(found == encoder.forward(&inputs).unwrap(), "{dtype}: not the same again");
        }
        let encoder = CudaEncoder::of_checkpoint(&device, &checkpoint, DataType::F32).unwrap();
        for (tokens, types) in [(vec![], None), (vec![3; 41], None), (vec![80], None), (vec![3], Some(vec![2]))] {
            let input = EncoderInput { tokens: &tokens, types: types.as_deref() };
            assert!(encoder.forward(&[input]).is_err(), "{tokens:?}, {types:?}");
        }
        assert!(CudaEncoder::of_checkpoint(&device, &checkpoint, DataType::I8).is_err());
    }
}

#[test]
fn perplexities_and_sentence_embeddings_are_those_of_the_cpu() {
    let Some(device) = device() else { return };
    let checkpoint = EncoderCheckpoint::open(directory("bert_masked")).unwrap();
    let tokens: Vec<u32> = (0..90).map(|i| 4 + i * 7 % 70).collect();
    let perplexity = |model: MaskedEncoder| model.perplexity(&tokens, 30, &mut |_, _| {}).unwrap();
    let expected = perplexity(MaskedEncoder::load(&checkpoint, DataType::F32).unwrap());
    for (dtype, tolerance) in [(DataType::F32, 1e-3), (DataType::F16, 0.02), (DataType::BF16, 0.1)] {
        let found = perplexity(MaskedEncoder::load_on(&device, &checkpoint, dtype).unwrap());
        assert_eq!(found.tokens, expected.tokens);
        assert!((found.perplexity / expected.perplexity - 1.0).abs() < tolerance, "{dtype}: {found:?}, {expected:?}");
    }
    let embedding = |model: SentenceEncoder| model.embedding("two of every four", 40).unwrap();
    let expected = embedding(SentenceEncoder::load(directory("bert"), DataType::F32).unwrap());
    let found = embedding(SentenceEncoder::load_on(&device, directory("bert"), DataType::F32).unwrap());
    let cosine: f64 = found.iter().zip(&expected).map(|(a, b)| a * b).sum();
    assert!(cosine > 0.99999, "{cosine}");
}
