//! Files of torch.save beside the same tensors in safetensors (`tests/fixtures/pytorch_files.py`), and damaged ones.

use std::{
    fs,
    path::{Path, PathBuf},
};

use proptest::prelude::*;

use super::super::{Compress, Convert, Decompress, Prune, Reader, Unchanged};
use crate::Selector;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pytorch").join(name)
}

/// Every tensor's name, dtype, shape and bytes, by name.
fn all(path: &Path) -> Vec<(String, String, Vec<u8>)> {
    let reader = Reader::open(path).unwrap();
    let mut found: Vec<_> = reader
        .tensors()
        .map(|info| {
            let bytes = reader.tensor(&info.name).unwrap().bytes().unwrap().to_vec();
            (info.name.clone(), format!("{} {:?}", info.dtype, info.shape), bytes)
        })
        .collect();
    found.sort();
    found
}

fn error(path: &Path) -> String {
    Reader::open(path).unwrap_err().to_string()
}

#[test]
fn tensors_are_those_that_torch_wrote_to_safetensors() {
    for (name, count) in [("plain.bin", 23), ("protocol_4.pt", 23), ("training.ckpt", 2)] {
        let path = fixture(name);
        let found = all(&path);
        assert_eq!(found, all(&path.with_extension("safetensors")), "{name}");
        assert_eq!(found.len(), count);
    }
}

#[test]
fn weights_that_torch_compressed_for_cutlass_are_compressed_here() {
    let path = fixture("semi_structured.pt");
    let reader = Reader::open(&path).unwrap().translated().unwrap();
    assert_eq!(reader.compressed_weights().count(), 4);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("dense.safetensors");
    Convert::new(reader).run(&out, Decompress).unwrap();
    assert_eq!(all(&out), all(&path.with_extension("safetensors")));
}

#[test]
fn a_model_in_shards_is_read_by_its_index_and_converted_to_safetensors() {
    let expected = all(&fixture("sharded.safetensors"));
    assert_eq!(all(&fixture("sharded")), expected);
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    Convert::open(fixture("sharded")).unwrap().run(&out, Unchanged).unwrap();
    assert_eq!(all(&out), expected);
    let mut names: Vec<String> =
        fs::read_dir(&out).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let [first, second, index, ..] = names.as_slice() else { panic!("{names:?}") };
    assert_eq!(
        [first.as_str(), second, index],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    );
}

#[test]
fn a_directory_with_a_file_of_torch_is_pruned_and_compressed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("model")).unwrap();
    fs::copy(fixture("training.ckpt"), at("model/pytorch_model.bin")).unwrap();
    fs::write(at("model/config.json"), "{}").unwrap();
    Convert::open(at("model")).unwrap().run(at("pruned"), Prune::new(|_| Some(Selector::TWO_FOUR))).unwrap();
    Convert::open(at("pruned")).unwrap().run(at("small"), Compress::default()).unwrap();
    assert_eq!(Reader::open(at("small")).unwrap().compressed::<f32>("weight").unwrap().rows(), 8);
    assert!(!at("pruned/pytorch_model.bin").exists());
}

#[test]
fn what_holds_no_plain_tensors_by_name_says_what_it_is() {
    for (name, expected) in [
        ("module.pt", "`torch.nn.modules.linear.Linear`"),
        ("list.pt", "no dictionary"),
        ("nothing.pt", "no tensor by name"),
        ("quantized.pt", "tensor `w`: it is made by torch._utils._rebuild_qtensor"),
        ("sparse.pt", "tensor `w`: it is made by torch._utils._rebuild_sparse_tensor"),
        ("cusparselt.pt", "tensor `w`: it was compressed by cuSPARSELt"),
        ("transposed.pt", "tensor `w`: it is compressed for CUTLASS without its rows"),
        ("legacy.pt", "before version 1.6"),
    ] {
        let found = error(&fixture(name));
        assert!(found.contains(expected) && found.contains(name), "{name}: {found}");
    }
}

#[test]
fn a_file_that_ends_early_is_an_error() {
    let bytes = fs::read(fixture("training.ckpt")).unwrap();
    for length in (0..bytes.len()).step_by(7) {
        let Ok(reader) = Reader::from_bytes("input", bytes[..length].to_vec()) else { continue };
        panic!("{length} of {} bytes: {reader:?}", bytes.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn damaged_files_are_errors_or_tensors_of_their_length(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = fs::read(fixture("training.ckpt")).unwrap();
        for (place, value) in damage {
            let place = place.index(bytes.len());
            bytes[place] = value;
        }
        if let Ok(reader) = Reader::from_bytes("input", bytes) {
            for info in reader.tensors() {
                prop_assume!(info.bytes < 1 << 20);
                let found = reader.tensor(&info.name).unwrap().bytes();
                prop_assert!(found.is_ok_and(|found| found.len() == info.bytes));
            }
        }
    }
}
