//! GGUF files as transformers and the package gguf read them (`tests/fixtures/gguf_models.py`), and damaged ones.

use std::{
    fs,
    path::{Path, PathBuf},
};

use half::{bf16, f16};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::{tests::run, *};
use crate::{
    Error, Selector,
    role::{Layout, Roles},
};

const FAMILIES: [&str; 7] = ["llama", "llama3", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf").join(name)
}

fn expected() -> Value {
    serde_json::from_slice(&fs::read(fixture("expected.json")).unwrap()).unwrap()
}

/// The elements of a tensor in f32.
fn floats(reader: &Reader, name: &str) -> Vec<f32> {
    let view = reader.tensor(name).unwrap();
    match view.info.dtype {
        StoredDType::F16 => view.elements::<f16>().unwrap().iter().map(|v| v.to_f32()).collect(),
        StoredDType::BF16 => view.elements::<bf16>().unwrap().iter().map(|v| v.to_f32()).collect(),
        _ => view.to_vec::<f32>().unwrap(),
    }
}

/// A tensor's shape, and the FNV-1a hash of its elements in f32.
fn described(reader: &Reader, info: &TensorInfo) -> String {
    let bytes: Vec<u8> = floats(reader, &info.name).iter().flat_map(|value| value.to_le_bytes()).collect();
    let hash = bytes
        .iter()
        .fold(0xCBF2_9CE4_8422_2325u64, |found, byte| (found ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3));
    let shape: Vec<String> = info.shape.iter().map(usize::to_string).collect();
    format!("{} {hash:016x}", shape.join("x"))
}

/// Every tensor of a model.
fn all(reader: &Reader) -> Value {
    reader.tensors().map(|info| (info.name.clone(), Value::from(described(reader, info)))).collect()
}

#[test]
fn every_encoding_is_decoded_as_by_the_package_gguf() {
    let reader = Reader::open(fixture("encodings.gguf")).unwrap();
    assert_eq!(all(&reader), expected()["encodings"]);
    assert_eq!(reader.tensors().count(), 13);
}

#[test]
fn every_family_has_the_tensors_that_transformers_finds() {
    for family in FAMILIES {
        let reader = Reader::open(fixture(&format!("{family}.gguf"))).unwrap();
        let found = all(&reader);
        assert_eq!(found, expected()["models"][family]["tensors"], "{family}");
        // In memory it is the same, and so is any part of a tensor.
        let bytes = fs::read(fixture(&format!("{family}.gguf"))).unwrap();
        let memory = Reader::from_bytes("m.gguf", bytes).unwrap();
        assert_eq!(all(&memory), found, "{family}");
        for info in reader.tensors() {
            let (view, whole) =
                (memory.tensor(&info.name).unwrap(), reader.tensor(&info.name).unwrap().bytes().unwrap());
            let size = info.dtype.bits() / 8;
            for (first, count) in [(0, 1), (1, 2), (info.bytes / size / 2, 3), (info.bytes / size - 1, 1)] {
                let count = count.min(info.bytes / size - first);
                let mut part = vec![0; count * size];
                view.read_into(first * size, &mut part).unwrap();
                assert_eq!(part, whole[first * size..][..count * size], "{family}: {}", info.name);
            }
        }
    }
}

#[test]
fn a_configuration_is_the_one_of_transformers() {
    let config = |family: &str| -> Value {
        let reader = Reader::open(fixture(&format!("{family}.gguf"))).unwrap();
        serde_json::from_slice(&reader.beside("config.json").unwrap().unwrap()).unwrap()
    };
    for (family, field, value) in [
        ("llama", "model_type", json!("llama")),
        ("llama", "torch_dtype", json!("float16")),
        ("llama", "head_dim", json!(8)),
        ("llama", "num_key_value_heads", json!(1)),
        ("llama", "rms_norm_eps", json!(1e-6)),
        ("llama", "attention_bias", json!(false)),
        ("llama", "tie_word_embeddings", json!(true)),
        ("llama", "bos_token_id", json!(1)),
        ("llama3", "tie_word_embeddings", json!(false)),
        (
            "llama3",
            "rope_scaling",
            json!({
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192
            }),
        ),
        ("qwen2", "rope_theta", json!(1e6)),
        ("qwen3", "head_dim", json!(128)),
        ("gemma2", "final_logit_softcapping", json!(30.0)),
        ("gemma2", "query_pre_attn_scalar", json!(8)),
        ("gemma3", "model_type", json!("gemma3_text")),
        ("gemma3", "layer_types", json!(["sliding_attention"])),
        ("gemma3", "rope_local_base_freq", json!(10000.0)),
        ("gpt2", "n_inner", json!(64)),
        ("gpt2", "n_positions", json!(1024)),
    ] {
        assert_eq!(config(family)[field], value, "{family}: {field}");
    }
    let ends = |family: &str| -> Value {
        let reader = Reader::open(fixture(&format!("{family}.gguf"))).unwrap();
        let text = reader.beside("generation_config.json").unwrap().unwrap();
        serde_json::from_slice::<Value>(&text).unwrap()["eos_token_id"].clone()
    };
    assert_eq!((ends("llama"), ends("qwen2")), (json!([2]), json!([266, 267])));
}

#[test]
fn a_file_becomes_a_directory_or_a_file_of_weights() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    for family in FAMILIES {
        let input = fixture(&format!("{family}.gguf"));
        run(&input, at(family), Overwrite::No, Unchanged).unwrap();
        let mut names: Vec<String> = fs::read_dir(at(family))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        let files =
            ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
        assert_eq!(names, files);
        let (from, to) = (Reader::open(&input).unwrap(), Reader::open(at(family)).unwrap());
        assert_eq!(all(&to), all(&from), "{family}");
        assert_eq!(to.metadata()["format"], "pt");
        for name in from.described() {
            assert_eq!(to.beside(name).unwrap(), from.beside(name).unwrap(), "{family}: {name}");
        }
        let settings: Value = serde_json::from_slice(&to.beside("tokenizer_config.json").unwrap().unwrap()).unwrap();
        let has_template = settings["chat_template"].as_str().is_some_and(|text| text.contains("message.content"));
        assert_eq!(has_template, !["llama", "gemma2", "gemma3"].contains(&family), "{family}");
    }
    run(fixture("qwen2.gguf"), at("alone.safetensors"), Overwrite::No, Unchanged).unwrap();
    assert!(at("alone.safetensors").is_file());
    // Beside the file itself, which stays.
    fs::create_dir(at("here")).unwrap();
    fs::copy(fixture("qwen2.gguf"), at("here/m.gguf")).unwrap();
    assert!(matches!(run(at("here/m.gguf"), at("here"), Overwrite::No, Unchanged), Err(Error::Exists { .. })));
    run(at("here/m.gguf"), at("here"), Overwrite::Yes, Unchanged).unwrap();
    assert!(at("here/m.gguf").is_file() && at("here/model.safetensors").is_file());
}

#[test]
fn linear_layers_are_pruned_along_what_they_sum() {
    let root = tempfile::tempdir().unwrap();
    for family in ["qwen2", "gpt2"] {
        let (input, output) = (fixture(&format!("{family}.gguf")), root.path().join(family));
        let report = prune(&input, &output, Selector::TWO_FOUR).unwrap();
        let names: Vec<&str> = report.changed().map(|(tensor, _)| tensor.name.as_str()).collect();
        assert_eq!(names.len(), if family == "gpt2" { 4 } else { 7 }, "{names:?}");
        let reader = Reader::open(&output).unwrap();
        let roles = Roles::of_model(&reader).unwrap();
        for (tensor, pruned) in report.changed() {
            let (shape, values) = ([tensor.shape[0], tensor.shape[1]], floats(&reader, &tensor.name));
            assert_eq!(pruned.density, 0.5);
            let layout = roles.layout(&tensor.name, &shape).unwrap();
            assert_eq!(layout, if family == "gpt2" { Layout::InOut } else { Layout::OutIn }, "{}", tensor.name);
            let matrix = crate::MatrixRef::new(shape[0], shape[1], &values).unwrap();
            assert!(
                crate::verify::conformance(matrix, crate::Pattern::TWO_FOUR, layout.reduction(), 0).unwrap().obeys()
            );
        }
    }
}

/// The bytes of a file, made by hand.
#[derive(Clone)]
struct Made {
    entries: Vec<(&'static str, u32, Vec<u8>)>,
    /// Name, sizes, encoding and offset.
    tensors: Vec<(&'static str, Vec<u64>, u32, u64)>,
    data: usize,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Made {
    /// A sound file of one matrix.
    fn sound() -> Self {
        let heads = 2u32.to_le_bytes().to_vec();
        Made {
            entries: vec![("general.architecture", 8, text("llama")), ("llama.attention.head_count", 4, heads)],
            tensors: vec![("blk.0.attn_q.weight", vec![32, 4], 0, 0)],
            data: 32 * 4 * 4,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.entries.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.entries {
            bytes.extend(text(key));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(value);
        }
        for (name, sizes, encoding, offset) in &self.tensors {
            bytes.extend(text(name));
            bytes.extend((sizes.len() as u32).to_le_bytes());
            sizes.iter().for_each(|size| bytes.extend(size.to_le_bytes()));
            bytes.extend(encoding.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32) + self.data, 0);
        bytes
    }

    fn refusal(&self) -> String {
        match Reader::from_bytes("m.gguf", self.bytes()) {
            Ok(_) => "accepted".to_owned(),
            Err(error @ (Error::Format { .. } | Error::InTensor { .. })) => error.to_string(),
            Err(error) => panic!("not about the file: {error}"),
        }
    }
}

#[test]
fn what_a_file_claims_is_checked() {
    assert_eq!(Made::sound().refusal(), "accepted");
    let tensor = |name, sizes: &[u64], encoding, offset| {
        let tensors = vec![(name, sizes.to_vec(), encoding, offset)];
        Made { tensors, ..Made::sound() }.refusal()
    };
    let query = "blk.0.attn_q.weight";
    let entry = |key, kind, value: &[u8]| {
        let mut made = Made::sound();
        made.entries.retain(|(other, ..)| *other != key);
        made.entries.push((key, kind, value.to_vec()));
        made.refusal()
    };
    let list = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    for (message, expected) in [
        (tensor(query, &[32, 8], 0, 0), "its bytes are not inside the file"),
        (tensor(query, &[32, 4], 0, u64::MAX), "its bytes are not inside the file"),
        (tensor(query, &[1 << 40, 1 << 40], 0, 0), "its bytes are not inside the file"),
        (tensor(query, &[u64::MAX, 4], 0, 0), "its bytes are not inside the file"),
        (tensor(query, &[32, 0], 0, 0), "its sizes are [32, 0]"),
        (tensor(query, &[], 0, 0), "its sizes are []"),
        (tensor(query, &[1; 9], 0, 0), "it has 9 dimensions"),
        (tensor(query, &[32, 2, 2], 0, 0), "two dimensions at most"),
        (tensor(query, &[32, 2], 0, 16), "its offset 16 is no multiple of 32"),
        (tensor(query, &[30, 4], 2, 0), "no whole blocks of 32, as Q4_0 has them"),
        (tensor(query, &[32, 3], 0, 0), "its 3 rows are no pairs of 2 heads"),
        (tensor("blk.0.attn_q.bias", &[32], 8, 0), "it is a bias in Q8_0"),
        (tensor(query, &[32, 4], 18, 0), "type 18 (IQ3_XXS) is not supported; supported are F32, F16, BF16, Q4_0"),
        (tensor(query, &[32, 4], 77, 0), "type 77 (unknown)"),
        (tensor("blk.0.attn_z.weight", &[32, 4], 0, 0), "tensor `blk.0.attn_z.weight` is none of llama"),
        (tensor("blk.00.attn_q.weight", &[32, 4], 0, 0), "is none of llama"),
        (tensor("blk.0.attn_q.scale", &[32, 4], 0, 0), "is none of llama"),
        (
            entry("general.architecture", 8, &text("mamba")),
            "a model of \"mamba\" is not supported; supported are llama",
        ),
        (entry("general.architecture", 4, &[0; 4]), "`general.architecture` is not a text"),
        (entry("llama.attention.head_count", 8, &text("2")), "`llama.attention.head_count` is not a whole number"),
        (entry("llama.attention.head_count", 4, &[0; 4]), "are no pairs of 0 heads"),
        (entry("general.alignment", 4, &33u32.to_le_bytes()), "which is no small power of two"),
        (entry("split.count", 2, &3u16.to_le_bytes()), "one of 3 files of a model"),
        (entry("x", 13, &[]), "a value of unknown kind 13"),
        (entry("x", 9, &list(9, 1)), "a list of lists"),
        (entry("x", 9, &list(4, u64::MAX)), "values are claimed"),
        (entry("x", 9, &list(8, 1 << 30)), "values are claimed"),
        (entry("x", 8, &u64::MAX.to_le_bytes()), "bytes are claimed"),
        (entry("x", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xFF]), "a text is not UTF-8"),
    ] {
        assert!(message.starts_with("m.gguf: ") && message.contains(expected), "{expected}: {message}");
    }
    let mut twice = Made::sound();
    twice.entries.push(("general.architecture", 8, text("llama")));
    assert!(twice.refusal().contains("`general.architecture` is there twice"));
    let mut twice = Made::sound();
    twice.tensors.push((query, vec![32, 4], 0, 512));
    twice.data *= 2;
    assert!(twice.refusal().contains("is there twice"));
    let mut overlapping = Made::sound();
    overlapping.tensors.push(("blk.1.attn_q.weight", vec![32, 4], 0, 256));
    overlapping.data *= 2;
    assert!(overlapping.refusal().contains("it overlaps the tensor before it"));
    for (version, expected) in
        [(1u32, "version 1 is not read"), (4, "version 4 is not read"), (3u32.swap_bytes(), "big-endian")]
    {
        let mut bytes = Made::sound().bytes();
        bytes[4..8].copy_from_slice(&version.to_le_bytes());
        let message = Reader::from_bytes("m.gguf", bytes).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    let missing = Made { entries: vec![], ..Made::sound() }.refusal();
    assert!(missing.contains("`general.architecture` is missing"), "{missing}");
}

#[test]
fn a_value_beyond_the_type_is_an_error_with_its_place() {
    let mut made = Made { tensors: vec![("blk.0.ffn_up.weight", vec![32, 4], 8, 0)], ..Made::sound() };
    made.data = 4 * 34;
    let mut bytes = made.bytes();
    let start = bytes.len() - made.data;
    bytes[start + 34..start + 36].copy_from_slice(&f16::from_f32(60000.0).to_le_bytes());
    bytes[start + 36 + 5] = 100;
    let reader = Reader::from_bytes("m.gguf", bytes).unwrap();
    let message = reader.tensor("model.layers.0.mlp.up_proj.weight").unwrap().bytes().unwrap_err().to_string();
    assert!(message.contains("element 37: ") && message.contains("is beyond F16"), "{message}");
}

proptest! {
    /// Damaged files are refused or read, never anything else.
    #[test]
    fn damaged_files_are_refused_or_read(
        family in proptest::sample::select(&FAMILIES[..]),
        damage in proptest::collection::vec((0usize..9000, any::<u8>()), 1..4),
        cut in 0usize..200,
    ) {
        let mut bytes = fs::read(fixture(&format!("{family}.gguf"))).unwrap();
        for (at, byte) in damage {
            bytes[at] = byte;
        }
        bytes.truncate(bytes.len() - cut.saturating_sub(100));
        if let Ok(reader) = Reader::from_bytes("m.gguf", bytes) {
            for info in reader.tensors().filter(|info| info.bytes < 1 << 16) {
                let _ = reader.tensor(&info.name).unwrap().bytes();
            }
            for name in reader.described() {
                let _ = reader.beside(name);
            }
        }
    }
}
