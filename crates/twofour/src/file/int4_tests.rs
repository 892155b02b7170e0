//! Weights of 4-bit integers in files: written, read, converted and damaged.

use std::{collections::BTreeMap, fs, path::Path};

use half::f16;
use proptest::prelude::*;

use super::{tests::run, *};
use crate::{
    Compressed, Error, MatrixRef, Selector,
    int4::{Granularity, Int4},
};

fn weight(rows: usize, cols: usize, granularity: Granularity) -> Int4 {
    let dense: Vec<f32> = (0..rows * cols).map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0).collect();
    Int4::quantize(&Compressed::from_pruned(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap(), granularity).unwrap()
}

/// A file with a weight of each granularity, the first with an odd shape, and a plain tensor.
fn write(path: &Path) -> [Int4; 2] {
    let weights = [weight(3, 270, Granularity::Group), weight(2, 8, Granularity::Row)];
    let mut plan = Plan::new();
    plan.tensor(PlannedTensor::new("norm", StoredDType::F32, [2]));
    for (name, weight) in ["by_group", "by_row"].into_iter().zip(&weights) {
        let q = weight.weight();
        plan.compressed(CompressedInfo::int4(name, weight.granularity(), q.rows(), q.cols()).unwrap());
    }
    let mut writer = Writer::create(path, Overwrite::No, plan, BTreeMap::new()).unwrap();
    writer.write_elements("norm", &[1.0f32, 2.0]).unwrap();
    for (name, weight) in ["by_group", "by_row"].into_iter().zip(&weights) {
        writer.write_int4(name, weight).unwrap();
    }
    writer.finish().unwrap();
    weights
}

fn written() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    write(&path);
    fs::read(path).unwrap()
}

#[test]
fn what_is_written_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    let weights = write(&path);
    let reader = Reader::open(&path).unwrap();
    assert_eq!(reader.plain_tensors().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["norm"]);
    for (info, weight) in reader.compressed_weights().zip(&weights) {
        assert_eq!(info.format, ValueFormat::Int4(weight.granularity()));
        assert_eq!((info.format.name(), info.format.group_size().is_some()), ("I4", info.name == "by_group"));
        assert_eq!(&reader.int4(&info.name).unwrap(), weight);
        let stored: usize = reader.tensors().filter(|t| t.name.starts_with(&info.name)).map(|t| t.bytes).sum();
        assert_eq!(info.bytes(), stored);
        assert_eq!(info.dense_bytes(), 4 * info.rows * info.cols);
        // Scales of 4-bit integers are no scales of rows.
        assert_eq!(reader.scales(&info.name).unwrap(), None);
        assert!(matches!(reader.compressed::<i8>(&info.name), Err(error) if error.to_string().contains("U8")));
    }
    // 3 bits for each of 270 + 2 elements, a word for each 32, and three scales a row.
    assert_eq!(reader.compressed_info("by_group").unwrap().bytes(), 3 * (68 + 9 * 4 + 3 * 2));
    assert!(reader.tensor("by_group.values").unwrap().elements::<u8>().is_ok());
}

#[test]
fn conversions_copy_or_dequantize() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let weights = write(&at("in"));
    let report = run(at("in"), at("compressed"), Overwrite::No, Compress::default()).unwrap();
    assert_eq!(report.tensors.iter().filter(|t| t.outcome == Outcome::Copied(Kept::Compressed)).count(), 2);
    run(at("in"), at("pruned"), Overwrite::No, Prune::new(|_| Some(Selector::TWO_FOUR))).unwrap();
    for copy in ["compressed", "pruned"] {
        let reader = Reader::open(at(copy)).unwrap();
        assert_eq!([reader.int4("by_group").unwrap(), reader.int4("by_row").unwrap()], weights);
    }
    let report = run(at("in"), at("dense"), Overwrite::No, Decompress).unwrap();
    let reader = Reader::open(at("dense")).unwrap();
    assert_eq!(reader.tensors().count(), 3);
    for ((described, made), (name, weight)) in report.changed().zip(["by_group", "by_row"].into_iter().zip(&weights)) {
        let view = reader.tensor(name).unwrap();
        assert_eq!(*view.elements::<f32>().unwrap(), weight.dequantize().to_dense());
        assert_eq!((made.dtype, &described.shape[..]), (crate::DataType::F32, &view.info.shape[..]));
        assert_eq!(described.bytes_after, view.info.bytes);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let int4 = |rows, cols| CompressedInfo::int4("w", Granularity::Group, rows, cols);
    assert!(matches!(int4(0, 4), Err(Error::EmptyWeight { .. })));
    assert!(matches!(int4(usize::MAX, 4), Err(Error::TooLarge { .. })));
    assert!(int4(1, 4).unwrap().with_scales().is_err());
    let directory = tempfile::tempdir().unwrap();
    let mut plan = Plan::new();
    plan.compressed(int4(3, 270).unwrap());
    let mut writer = Writer::create(directory.path().join("m"), Overwrite::No, plan, BTreeMap::new()).unwrap();
    // Of another granularity than planned: too few scales.
    assert!(writer.write_int4("w", &weight(3, 270, Granularity::Row)).is_err());
    let reader = Reader::from_bytes("m", written()).unwrap();
    assert!(matches!(reader.int4("absent"), Err(Error::NoTensor { .. })));
}

#[test]
fn false_entries_are_named() {
    let bytes = written();
    for (from, to, expected) in [
        (r#""group_size":128"#, r#""group_size":129"#, "compressed weight `by_group`: group_size 129"),
        (r#""group_size":128"#, r#""group_size":1.5"#, "expected u64"),
        (r#""group_size":128"#, r#""group_sizes":12"#, "`by_group.scales` should be F16 [3, 1] and is F16 [3, 3]"),
        (r#""dtype":"I4""#, r#""dtype":"I8""#, "its tensor `by_group.values` should be I8"),
        (r#""dtype":"I4""#, r#""dtype":"I5""#, "dtype `I5` is unknown"),
        (r#""shape":[3,270]"#, r#""shape":[3,280]"#, "its tensor `by_group.values` should be U8 [3, 70]"),
    ] {
        let message = super::tests::refusal_of(&bytes, from, to);
        assert!(message.starts_with("m.safetensors: ") && message.contains(expected), "{from}: {message}");
    }
}

#[test]
fn damaged_parts_name_file_tensor_and_place() {
    let bytes = written();
    let header = Header::parse(Path::new("m"), &bytes).unwrap();
    let damage = |part: &str, at: usize, with: &[u8]| {
        let tensor = header.tensors().iter().find(|t| t.name == part).unwrap();
        let start = header.range(tensor).start + at;
        let mut damaged = bytes.clone();
        damaged[start..start + with.len()].copy_from_slice(with);
        let name = part.split('.').next().unwrap();
        Reader::from_bytes("m.safetensors", damaged).unwrap().int4(name).unwrap_err().to_string()
    };
    let infinite = f16::INFINITY.to_le_bytes();
    for (message, expected) in [
        (damage("by_group.meta", 36, &[0x40]), "row 1, group 0: metadata code 0x0"),
        (damage("by_group.scales", 2 * 5, &infinite), "row 1"),
        // The last group of a row has two columns: its code keeps these, whatever is stored beside them.
        (damage("by_group.meta", 32, &[0xEE, 0xEE, 0xEE, 0xEE]), "row 0, group"),
    ] {
        assert!(message.starts_with("m.safetensors: tensor `by_") && message.contains(expected), "{message}");
    }
}

proptest! {
    /// Random damage gives an error or a weight of the shape; never a panic.
    #[test]
    fn damage_never_panics(places in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        thread_local!(static MODEL: Vec<u8> = written());
        let mut bytes = MODEL.with(Clone::clone);
        for (at, byte) in places {
            let reach = bytes.len();
            bytes[at.index(reach)] = byte;
        }
        let Ok(reader) = Reader::from_bytes("m", bytes) else { return Ok(()) };
        for info in reader.compressed_weights() {
            if let Ok(weight) = reader.int4(&info.name) {
                let dense = weight.dequantize().to_dense();
                prop_assert_eq!(dense.len(), info.rows * info.cols);
                prop_assert!(dense.iter().all(|value| value.is_finite()));
            }
        }
    }
}
