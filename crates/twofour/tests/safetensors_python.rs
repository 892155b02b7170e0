//! Against the Python package: its files are read, and ours are read by it.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use twofour::{
    Compressed, DataType, Element, F8E4M3, F8E5M2, MatrixRef,
    file::{
        Compress, CompressedInfo, Convert, Decompress, Overwrite, Plan, PlannedTensor, Reader, StoredDType, Writer,
    },
    int4::{Granularity, Int4},
    int8::Int8,
};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/safetensors").join(name)
}

/// Dtype, shape and bytes of every stored tensor.
fn tensors(path: &Path) -> BTreeMap<String, (&'static str, Vec<usize>, Vec<u8>)> {
    let reader = Reader::open(path).unwrap();
    let read = |name: &str| reader.tensor(name).unwrap().bytes().unwrap().into_owned();
    reader.tensors().map(|t| (t.name.clone(), (t.dtype.name(), t.shape.clone(), read(&t.name)))).collect()
}

#[test]
fn files_of_the_package_are_read() {
    let dense = tensors(&fixture("dense.safetensors"));
    assert_eq!(dense.len(), 18 + 9 + 2);
    assert_eq!(dense["scalar"], ("F32", vec![], 0.5f32.to_le_bytes().to_vec()));
    assert_eq!(dense["empty"], ("F32", vec![0, 4], vec![]));
    assert_eq!(tensors(&fixture("sharded")), dense);
    let reader = Reader::open(fixture("dense.safetensors")).unwrap();
    assert_eq!(reader.metadata()["quote"], "\"ü\"");
    for t in reader.tensors().filter(|t| t.dtype == StoredDType::I64) {
        assert_eq!(reader.tensor(&t.name).unwrap().elements::<i64>().unwrap().len(), 6);
    }
}

/// Two compressors that share nothing but the specification must agree on every byte.
#[test]
fn the_fixture_of_a_second_compressor_is_ours() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let options = Compress { which: &|t| t.name.ends_with(".weight"), ..Default::default() };
    let report = Convert::open(fixture("dense.safetensors")).unwrap().run(at("small"), options).unwrap();
    assert!(report.changed().all(|(_, made)| made.negative_zeros == 0));
    assert_eq!(tensors(&at("small")), tensors(&fixture("compressed.safetensors")));
    let (ours, theirs) = (Reader::open(at("small")).unwrap(), Reader::open(fixture("compressed.safetensors")).unwrap());
    assert!(ours.compressed_weights().eq(theirs.compressed_weights()));
    assert_eq!(ours.compressed_weights().count(), 18);

    Convert::open(fixture("compressed.safetensors")).unwrap().run(at("back"), Decompress).unwrap();
    assert_eq!(tensors(&at("back")), tensors(&fixture("dense.safetensors")));
    Convert::open(fixture("sharded")).unwrap().run(at("shards"), options).unwrap();
    assert_eq!(tensors(&at("shards")), tensors(&at("small")));
    Convert::open(at("shards")).unwrap().run(at("shards back"), Decompress).unwrap();
    assert_eq!(tensors(&at("shards back")), tensors(&fixture("dense.safetensors")));
}

/// Runs a Python script and gives its output; `None`, and a line that says why, where Python or a package it needs is
/// not there.
fn python(needs: &str, script: &str, argument: &Path) -> Option<String> {
    let present = Command::new("python3").args(["-c", &format!("import {needs}")]).output();
    if !present.as_ref().is_ok_and(|o| o.status.success()) {
        eprintln!("skipped: python3 with {needs} is not installed");
        return None;
    }
    let output = Command::new("python3").arg("-c").arg(script).arg(argument).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn the_package_reads_our_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("small");
    Convert::open(fixture("dense.safetensors")).unwrap().run(&path, Compress::default()).unwrap();
    let script = "import sys, safetensors\n\
        for name, t in safetensors.deserialize(open(sys.argv[1], 'rb').read()):\n\
        \x20   print(name, t['dtype'], *t['shape'], '=', bytes(t['data']).hex())\n\
        with safetensors.safe_open(sys.argv[1], framework='np') as f:\n\
        \x20   print(sorted(f.metadata()))\n";
    let Some(output) = python("safetensors", script, &path) else { return };
    let mut expected: Vec<String> = tensors(&path)
        .into_iter()
        .map(|(name, (dtype, shape, data))| {
            let shape: String = shape.iter().map(|d| format!(" {d}")).collect();
            format!("{name} {dtype}{shape} = {}", hex(&data))
        })
        .collect();
    expected.push("['format', 'quote', 'twofour']".to_owned());
    let mut output: Vec<&str> = output.lines().map(str::trim_end).collect();
    output.sort_unstable();
    let mut expected: Vec<&str> = expected.iter().map(|line| line.trim_end()).collect();
    expected.sort_unstable();
    assert_eq!(output, expected);
}

/// The text of the first block of `docs/reference/format.md` that is marked with that language.
fn block_of_the_specification(language: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/format.md");
    let text = std::fs::read_to_string(path).unwrap();
    let begin =
        text.find(&format!("\n```{language}\n")).expect("the specification has such a block") + 5 + language.len();
    let length = text[begin..].find("\n```").unwrap();
    text[begin..begin + length].to_owned()
}

/// The bytes of the specification's worked example are those that we write, and mean what it says.
#[test]
fn the_specifications_example_is_what_we_write() {
    let example: Vec<u8> = block_of_the_specification("hexdump")
        .lines()
        // Offset, bytes, and behind a bar the same bytes as text.
        .flat_map(|line| line.split('|').next().unwrap_or_default().split_whitespace().skip(1))
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect();
    let w = [0.0f32, 5.0, 0.0, 6.0, 7.0, 0.0, 0.0, 0.0, 0.0, -1.0, 2.0, 0.0];
    let weight = Compressed::from_dense(MatrixRef::new(2, 6, &w).unwrap()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("example.safetensors");
    let mut plan = Plan::new();
    plan.compressed(CompressedInfo::new("w", DataType::F32, 2, 6).unwrap());
    let mut writer = Writer::create(&path, Overwrite::No, plan, BTreeMap::new()).unwrap();
    writer.write_compressed("w", &weight).unwrap();
    writer.finish().unwrap();
    assert_eq!(hex(&std::fs::read(&path).unwrap()), hex(&example));
    let read = Reader::from_bytes("example", example).unwrap().compressed::<f32>("w").unwrap();
    assert_eq!(read.to_dense(), w);
}

#[test]
fn the_specifications_reader_reads_our_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("small");
    Convert::open(fixture("dense.safetensors")).unwrap().run(&path, Compress::default()).unwrap();
    let script = block_of_the_specification("python")
        + "\nimport sys\nfor name, t in read(sys.argv[1]).items():\n    print(name, t.shape, t.tobytes().hex())\n";
    let Some(output) = python("numpy", &script, &path) else { return };
    let mut output: Vec<&str> = output.lines().collect();
    output.sort_unstable();
    let shape = |dims: &[usize]| match dims {
        [] => "()".to_owned(),
        [one] => format!("({one},)"),
        dims => format!("({})", dims.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    };
    let mut expected: Vec<String> = tensors(&fixture("dense.safetensors"))
        .into_iter()
        .map(|(name, (_, dims, data))| format!("{name} {} {}", shape(&dims), hex(&data)))
        .collect();
    expected.sort_unstable();
    assert_eq!(output, expected);
}

/// Every dtype of the fixture is one that this crate reads as elements.
#[test]
fn elements_of_every_dtype_are_read() {
    fn check<T: Element>(reader: &Reader, label: &str) {
        for (rows, cols) in [(3, 8), (2, 35), (1, 1)] {
            let name = format!("layer.{label}.{rows}x{cols}.weight");
            let view = reader.tensor(&name).unwrap();
            let elements = view.elements::<T>().unwrap();
            assert_eq!(bytemuck::cast_slice::<T, u8>(&elements), &*view.bytes().unwrap());
            assert!(elements.iter().all(|v| v.to_f32().is_finite() && !v.is_negative_zero()));
            assert_eq!(PlannedTensor::new(&name, T::DTYPE, [rows, cols]).shape, view.info.shape);
        }
    }
    let reader = Reader::open(fixture("dense.safetensors")).unwrap();
    check::<f32>(&reader, "f32");
    check::<half::f16>(&reader, "f16");
    check::<half::bf16>(&reader, "bf16");
    check::<i8>(&reader, "i8");
    check::<F8E4M3>(&reader, "e4m3");
    check::<F8E5M2>(&reader, "e5m2");
}

/// The specification's reader makes of 4-bit integers, and of groups of 8-bit ones, what ours does.
#[test]
fn the_specifications_reader_dequantizes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("int4");
    let dense: Vec<f32> = (0..3 * 270).map(|i| (i * 37 % 101) as f32 - 50.0).collect();
    let pruned = Compressed::from_pruned(MatrixRef::new(3, 270, &dense).unwrap()).unwrap();
    let weights = Granularity::ALL.map(|g| Int4::quantize(&pruned, g).unwrap());
    let eight = [Granularity::Group, Granularity::Group64].map(|g| Int8::quantize(&pruned, g).unwrap());
    let (names, eight_names) = (["a", "b", "c"], ["d", "e"]);
    let mut plan = Plan::new();
    for (name, weight) in names.into_iter().zip(&weights) {
        plan.compressed(CompressedInfo::int4(name, weight.granularity(), 3, 270).unwrap());
    }
    for (name, weight) in eight_names.into_iter().zip(&eight) {
        plan.compressed(CompressedInfo::int8(name, weight.granularity(), 3, 270).unwrap());
    }
    let mut writer = Writer::create(&path, Overwrite::No, plan, BTreeMap::new()).unwrap();
    for (name, weight) in names.into_iter().zip(&weights) {
        writer.write_int4(name, weight).unwrap();
    }
    for (name, weight) in eight_names.into_iter().zip(&eight) {
        writer.write_int8(name, weight).unwrap();
    }
    writer.finish().unwrap();
    let script = block_of_the_specification("python")
        + "\nimport sys\nfor name, t in sorted(read(sys.argv[1]).items()):\n    print(name, t.shape, t.dtype, \
           t.tobytes().hex())\n";
    let Some(output) = python("numpy", &script, &path) else { return };
    let dense =
        weights.iter().map(|w| w.dequantize().to_dense()).chain(eight.iter().map(|w| w.dequantize().to_dense()));
    let expected = names.into_iter().chain(eight_names).zip(dense);
    let expected = expected.map(|(n, w)| format!("{n} (3, 270) float32 {}", hex(bytemuck::cast_slice(&w))));
    assert_eq!(output.lines().collect::<Vec<_>>(), expected.collect::<Vec<_>>());
}
