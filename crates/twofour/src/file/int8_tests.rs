//! Weights of 8-bit integers with scales, and [`Quantize`](super::Quantize) to 8 and 4 bits.

use std::{collections::BTreeMap, fs, path::Path};

use half::bf16;
use proptest::prelude::*;

use super::{tests::run, *};
use crate::{
    Compressed, Error, Mask, MatrixRef,
    int4::{Granularity, Int4},
    int8::Int8,
    quantization::ScaleRule,
};

fn dense(rows: usize, cols: usize) -> Vec<f32> {
    let value = |i: usize| if i % 4 < 2 { ((i * 37 % 101) as f32 - 50.0) / 16.0 } else { 0.0 };
    (0..rows * cols).map(|i| value(i % cols)).collect()
}

fn sparse(rows: usize, cols: usize) -> Compressed<f32> {
    let dense = dense(rows, cols);
    Compressed::from_masked(
        MatrixRef::new(rows, cols, &dense).unwrap(),
        &Mask::from_fn(rows, cols, |_, col| col % 4 < 2),
    )
    .unwrap()
}

/// A file with a weight of each granularity.
fn write(path: &Path) -> Vec<(String, Int8)> {
    let weights: Vec<_> = [("row", Granularity::Row), ("wide", Granularity::Group), ("narrow", Granularity::Group64)]
        .map(|(name, granularity)| (name.to_owned(), Int8::quantize(&sparse(3, 270), granularity).unwrap()))
        .into();
    let mut plan = Plan::new();
    for (name, weight) in &weights {
        plan.compressed(CompressedInfo::int8(name, weight.granularity(), 3, 270).unwrap());
    }
    let mut writer = Writer::create(path, Overwrite::No, plan, BTreeMap::new()).unwrap();
    for (name, weight) in &weights {
        writer.write_int8(name, weight).unwrap();
    }
    writer.finish().unwrap();
    weights
}

#[test]
fn what_is_written_is_read_and_dequantized() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let weights = write(&at("in"));
    let reader = Reader::open(at("in")).unwrap();
    for (name, weight) in &weights {
        assert_eq!(&reader.int8(name).unwrap(), weight);
        let info = reader.compressed_info(name).unwrap();
        let stored: usize = reader.tensors().filter(|t| t.name.starts_with(name)).map(|t| t.bytes).sum();
        assert_eq!((info.bytes(), info.format.name()), (stored, "I8"));
        assert!(matches!(reader.int4(name), Err(error) if error.to_string().contains("not 4-bit")));
    }
    run(at("in"), at("copy"), Overwrite::No, Compress::default()).unwrap();
    assert_eq!(&Reader::open(at("copy")).unwrap().int8("wide").unwrap(), &weights[1].1);
    run(at("in"), at("dense"), Overwrite::No, Decompress).unwrap();
    let back = Reader::open(at("dense")).unwrap();
    for (name, weight) in &weights {
        assert_eq!(back.tensor(name).unwrap().to_vec::<f32>().unwrap(), weight.dequantize().to_dense(), "{name}");
    }
    assert_eq!(back.tensors().count(), weights.len());
}

#[test]
fn a_file_has_the_oldest_version_that_describes_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m");
    write(&path);
    let bytes = fs::read(&path).unwrap();
    let text = |name: &str| Reader::open(directory.path().join(name)).unwrap().metadata()[MANIFEST_KEY].clone();
    assert!(text("m").contains(r#""version":2"#));
    // Version 1 has no groups of 8-bit integers: its readers ignore their field and take the scales for an ordinary
    // tensor.
    let version = br#"\"version\":2"#;
    let place = bytes.windows(version.len()).position(|w| w == version).unwrap() + version.len() - 1;
    let mut older = bytes;
    older[place] = b'1';
    let older = Reader::from_bytes("m", older).unwrap();
    assert!(matches!(older.int8("wide"), Err(error) if error.to_string().contains("without scales")));
    assert_eq!(older.plain_tensors().count(), 2);
    for (granularity, version) in [(Granularity::Row, 1), (Granularity::Group, 1), (Granularity::Group64, 2)] {
        let mut plan = Plan::new();
        plan.compressed(CompressedInfo::int4("w", granularity, 3, 270).unwrap());
        let name = format!("{granularity:?}");
        let mut writer = Writer::create(directory.path().join(&name), Overwrite::No, plan, BTreeMap::new()).unwrap();
        writer.write_int4("w", &Int4::quantize(&sparse(3, 270), granularity).unwrap()).unwrap();
        writer.finish().unwrap();
        assert!(text(&name).contains(&format!(r#""version":{version}"#)), "{granularity:?}");
        assert_eq!(Reader::open(directory.path().join(&name)).unwrap().int4("w").unwrap().granularity(), granularity);
    }
}

/// A directory with two shards, a configuration and a folder; the second shard has a dense, a compressed and a plain
/// tensor.
fn model(directory: &Path, damage: Option<f32>) {
    fs::create_dir_all(directory.join("1_Pooling")).unwrap();
    fs::write(directory.join("config.json"), "{}").unwrap();
    fs::write(directory.join("pytorch_model.bin"), "weights").unwrap();
    fs::write(directory.join(".hidden"), "").unwrap();
    fs::write(directory.join("1_Pooling/config.json"), "[]").unwrap();
    let mut first = dense(4, 132);
    first[132 + 1] = damage.unwrap_or(first[132 + 1]);
    let first: Vec<bf16> = first.into_iter().map(bf16::from_f32).collect();
    let plan = vec![
        PlannedTensor::new("a.weight", StoredDType::BF16, [4, 132]),
        PlannedTensor::new("norm", StoredDType::F32, [3]),
    ];
    let mut writer = Writer::create(directory.join("a.safetensors"), Overwrite::No, plan, BTreeMap::new()).unwrap();
    writer.write_elements("a.weight", &first).unwrap();
    writer.write_elements("norm", &[1.0f32, 2.0, 3.0]).unwrap();
    writer.finish().unwrap();
    let mut plan = Plan::new();
    plan.compressed(CompressedInfo::new("b.weight", crate::DataType::F32, 3, 270).unwrap());
    plan.tensor(PlannedTensor::new("dense.weight", StoredDType::F32, [1, 4]));
    let mut writer = Writer::create(directory.join("b.safetensors"), Overwrite::No, plan, BTreeMap::new()).unwrap();
    writer.write_compressed("b.weight", &sparse(3, 270)).unwrap();
    writer.write_elements("dense.weight", &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
    writer.finish().unwrap();
    let index = r#"{"metadata": {}, "weight_map": {"a.weight": "a.safetensors", "norm": "a.safetensors", "b.weight.values": "b.safetensors", "b.weight.meta": "b.safetensors", "dense.weight": "b.safetensors"}}"#;
    fs::write(directory.join("model.safetensors.index.json"), index).unwrap();
}

fn options(to: Quantization) -> Quantize<'static> {
    Quantize { which: &|_, _, _| true, dense: &|_, _, _| false, to, rule: ScaleRule::MaxAbs }
}

#[test]
fn a_directory_gives_a_directory_and_masks_stay() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    model(&at("in"), None);
    let kinds = [
        Quantization::Int8(Granularity::Row),
        Quantization::Int8(Granularity::Group64),
        Quantization::Int4(Granularity::Row),
        Quantization::Int4(Granularity::Group),
    ];
    for to in kinds {
        let out = at(&format!("{to:?}"));
        let report = run(at("in"), &out, Overwrite::No, options(to)).unwrap();
        let outcome = |name: &str| report.tensors.iter().find(|t| t.name == name).unwrap().outcome;
        assert_eq!(outcome("norm"), Outcome::Copied(Kept::NotAMatrix));
        assert_eq!(outcome("dense.weight"), Outcome::Copied(Kept::NotSparse { violations: 1 }));
        let most = if matches!(to, Quantization::Int8(_)) { 0.01 } else { 0.2 };
        for name in ["a.weight", "b.weight"] {
            let Outcome::Changed(Quantized { relative_error, is_dense: false }) = outcome(name) else {
                panic!("{name}")
            };
            assert!(relative_error > 0.0 && relative_error < most, "{to:?} {name}: {relative_error}");
        }
        let reader = Reader::open(&out).unwrap();
        let meta = match to {
            Quantization::Int8(_) => reader.int8("b.weight").unwrap().weight().meta().to_vec(),
            Quantization::Int4(_) => reader.int4("b.weight").unwrap().weight().meta().to_vec(),
        };
        assert_eq!(meta, sparse(3, 270).meta());
        assert_eq!(fs::read(out.join("1_Pooling/config.json")).unwrap(), b"[]");
        assert!(
            out.join("config.json").exists()
                && !out.join("pytorch_model.bin").exists()
                && !out.join(".hidden").exists()
        );
        // What is quantized is left as it is.
        let again = run(&out, at("again"), Overwrite::Yes, options(to)).unwrap();
        assert!(again.tensors.iter().filter(|t| t.outcome == Outcome::Copied(Kept::Integers)).count() == 2);
    }
    // A directory with one file gives a directory too, or that file alone by its name.
    let single = at("single");
    fs::create_dir(&single).unwrap();
    fs::copy(at("in/a.safetensors"), single.join("model.safetensors")).unwrap();
    fs::write(single.join("tokenizer.json"), "{}").unwrap();
    run(&single, at("out"), Overwrite::No, options(kinds[3])).unwrap();
    assert!(at("out/tokenizer.json").exists() && at("out/twofour-model.safetensors").exists());
    run(&single, at("alone.safetensors"), Overwrite::No, options(kinds[3])).unwrap();
    assert_eq!(fs::read(at("alone.safetensors")).unwrap(), fs::read(at("out/twofour-model.safetensors")).unwrap());
    assert!(matches!(run(&single, at("out"), Overwrite::No, options(kinds[3])), Err(Error::Exists { .. })));
}

#[test]
fn a_weight_that_cannot_be_leaves_nothing() {
    for (value, expected) in
        [(f32::NAN, "row 1, column 1"), (f32::INFINITY, "row 1, column 1"), (1e30, "row 1, scale 0")]
    {
        let root = tempfile::tempdir().unwrap();
        let (input, output) = (root.path().join("in"), root.path().join("out"));
        model(&input, Some(value));
        let to = Quantization::Int4(Granularity::Group);
        let message = run(&input, &output, Overwrite::No, options(to)).unwrap_err().to_string();
        assert!(message.contains("a.safetensors: tensor `a.weight`") && message.contains(expected), "{message}");
        assert!(!output.exists());
    }
}

proptest! {
    /// Random damage gives an error or a weight of the shape; never a panic.
    #[test]
    fn damage_never_panics(places in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        thread_local!(static MODEL: Vec<u8> = {
            let directory = tempfile::tempdir().unwrap();
            write(&directory.path().join("m"));
            fs::read(directory.path().join("m")).unwrap()
        });
        let mut bytes = MODEL.with(Clone::clone);
        for (at, byte) in places {
            let reach = bytes.len();
            bytes[at.index(reach)] = byte;
        }
        let Ok(reader) = Reader::from_bytes("m", bytes) else { return Ok(()) };
        for info in reader.compressed_weights() {
            if let Ok(weight) = reader.int8(&info.name) {
                let dense = weight.dequantize().to_dense();
                prop_assert_eq!(dense.len(), info.rows * info.cols);
            }
        }
    }
}
