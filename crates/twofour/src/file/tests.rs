//! Files written, read back and damaged.

use std::{collections::BTreeMap, fs, path::Path};

use half::bf16;
use proptest::prelude::*;

use super::*;
use crate::{Compressed, DataType, Error, MatrixRef};

/// Converts a model without being watched.
pub(super) fn run<O: Operation>(
    input: impl AsRef<Path>,
    output: impl AsRef<Path>,
    overwrite: Overwrite,
    operation: O,
) -> crate::Result<Report<O::Change>> {
    Convert::open(input)?.overwrite(overwrite).run(output, operation)
}

/// A file with a compressed weight, a scaled one and plain tensors of several dtypes.
fn small_model(path: &Path, overwrite: Overwrite) -> Result<(), Error> {
    let up: Vec<bf16> = (0..6 * 10).map(|i| bf16::from_f32(i as f32 - 30.0)).collect();
    let up = Compressed::from_pruned(MatrixRef::new(6, 10, &up)?)?;
    let down: Vec<i8> = (0..40).map(|i| i as i8 * 3 - 60).collect();
    let down = Compressed::from_pruned(MatrixRef::new(5, 8, &down)?)?;
    let mut plan = Plan::new();
    plan.tensor(PlannedTensor::new("norm", StoredDType::F32, [3]))
        .compressed(CompressedInfo::new("up", DataType::BF16, 6, 10)?)
        .tensor(PlannedTensor::new("flag", StoredDType::Bool, [1]))
        .tensor(PlannedTensor::new("ids", StoredDType::I64, [2]))
        .tensor(PlannedTensor::new("nothing", StoredDType::F16, [0, 4]))
        .compressed(CompressedInfo::new("down", DataType::I8, 5, 8)?.with_scales()?);
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut writer = Writer::create(path, overwrite, plan, metadata)?;
    writer.write_compressed("up", &up)?;
    writer.write_compressed("down", &down)?;
    writer.write_elements("down.scales", &[0.5f32; 5])?;
    writer.write("flag", &[1])?;
    writer.write_elements("norm", &[1.0f32, 2.0, 3.0])?;
    writer.write_elements("ids", &[-1i64, 7])?;
    writer.finish()
}

fn small_model_bytes() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    small_model(&path, Overwrite::No).unwrap();
    fs::read(path).unwrap()
}

fn entries(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn what_is_written_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    small_model(&path, Overwrite::No).unwrap();
    assert_eq!(entries(directory.path()), ["m.safetensors"]);
    let whole = fs::read(&path).unwrap();
    // A directory that holds one file is that file.
    for reader in [Reader::open(&path).unwrap(), Reader::open(directory.path()).unwrap()] {
        let names: Vec<_> = reader.tensors().map(|t| t.name.as_str()).collect();
        assert_eq!(
            names,
            ["ids", "down.meta", "down.scales", "norm", "up.meta", "nothing", "up.values", "down.values", "flag"]
        );
        let plain: Vec<_> = reader.plain_tensors().map(|t| t.name.as_str()).collect();
        assert_eq!(plain, ["ids", "norm", "nothing", "flag"]);
        assert_eq!(reader.metadata()["format"], "pt");
        for tensor in reader.tensors() {
            let header = Header::parse(&path, &whole).unwrap();
            let start = header.range(tensor).start;
            assert_eq!(start % tensor.dtype.bits().div_ceil(8), 0, "{} is not aligned", tensor.name);
            assert_eq!(*reader.tensor(&tensor.name).unwrap().bytes().unwrap(), whole[header.range(tensor)]);
        }
        assert_eq!(*reader.tensor("ids").unwrap().elements::<i64>().unwrap(), [-1, 7]);
        let weights: Vec<_> = reader
            .compressed_weights()
            .map(|w| (w.name.as_str(), w.rows, w.cols, w.format == ValueFormat::ScaledI8))
            .collect();
        assert_eq!(weights, [("down", 5, 8, true), ("up", 6, 10, false)]);
        let up = reader.compressed::<bf16>("up").unwrap();
        assert_eq!(reader.compressed_info("up").unwrap().bytes(), up.bytes());
        assert_eq!((up.rows(), up.cols(), up.to_dense()[0]), (6, 10, bf16::from_f32(-30.0)));
        assert_eq!(reader.scales("down").unwrap().unwrap(), [0.5; 5]);
        assert_eq!(reader.scales("up").unwrap(), None);
    }
}

#[test]
fn a_manifest_may_list_weights_of_other_files() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let whole = Reader::from_bytes("m.safetensors", small_model_bytes()).unwrap();
    // As transformers cuts a model: the same metadata in every file, and a weight's parts wherever the cut falls.
    let files = ["1.safetensors", "2.safetensors"];
    let mut index = Index { metadata: Default::default(), weight_map: BTreeMap::new() };
    let write = |file: &str, half: usize, metadata: &BTreeMap<String, String>| {
        let tensors: Vec<_> = whole.tensors().skip(half * 5).take(5).collect();
        let views = tensors.iter().map(|t| {
            let dtype: ::safetensors::Dtype = serde_json::from_value(t.dtype.name().into()).unwrap();
            (t.name.clone(), dtype, t.shape.clone(), whole.tensor(&t.name).unwrap().bytes().unwrap())
        });
        let views: Vec<_> = views.collect();
        let views = views.iter().map(|(name, dtype, shape, bytes)| {
            (name, ::safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        let metadata = metadata.clone().into_iter().collect();
        ::safetensors::serialize_to_file(views, Some(metadata), &at(file)).unwrap();
        tensors.into_iter().map(|t| (t.name.clone(), file.to_owned())).collect::<Vec<_>>()
    };
    for (half, file) in files.iter().enumerate() {
        index.weight_map.extend(write(file, half, whole.metadata()));
    }
    assert_ne!(index.weight_map["up.values"], index.weight_map["up.meta"], "the cut falls between the parts");
    fs::write(at("m.safetensors.index.json"), index.to_json()).unwrap();

    let cut = Reader::open(directory.path()).unwrap();
    let sorted = |reader: &Reader| {
        let mut weights: Vec<_> = reader.compressed_weights().cloned().collect();
        weights.sort_by(|a, b| a.name.cmp(&b.name));
        let mut plain: Vec<_> = reader.plain_tensors().map(|t| t.name.clone()).collect();
        plain.sort();
        (weights, plain)
    };
    assert_eq!(sorted(&cut), sorted(&whole));
    assert_eq!(cut.compressed::<bf16>("up").unwrap(), whole.compressed::<bf16>("up").unwrap());
    assert_eq!(cut.compressed::<i8>("down").unwrap(), whole.compressed::<i8>("down").unwrap());
    assert_eq!(cut.scales("down").unwrap(), whole.scales("down").unwrap());
    // By itself a file is damaged, and the message says how to read it.
    let lone = Reader::open(at(files[0])).unwrap_err().to_string();
    assert!(lone.contains("is missing; a file of a sharded model is read through its index"), "{lone}");

    let mut other = whole.metadata().clone();
    let manifest = other.get_mut(MANIFEST_KEY).unwrap();
    *manifest = manifest.replace("[6,10]", "[6,12]");
    write(files[1], 1, &other);
    let error = Reader::open(directory.path()).unwrap_err().to_string();
    assert!(error.contains("weight `up` has another description in another shard"), "{error}");
}

#[test]
fn wrong_questions_get_clear_answers() {
    let reader = Reader::from_bytes("m.safetensors", small_model_bytes()).unwrap();
    for (error, expected) in [
        (reader.tensor("up").unwrap_err(), "there is no tensor `up`; it is stored compressed"),
        (reader.tensor("x").unwrap_err(), "there is no tensor `x`; it holds 9 tensors"),
        (reader.compressed::<f32>("norm").unwrap_err(), "there is no compressed weight `norm`; it is stored dense"),
        (reader.compressed::<f32>("up").unwrap_err(), "tensor `up.values`: expected dtype F32, found BF16"),
        (reader.tensor("norm").unwrap().elements::<u8>().unwrap_err(), "tensor `norm`: expected dtype U8, found F32"),
    ] {
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn existing_outputs_are_kept_unless_told_otherwise() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    fs::write(&path, "precious").unwrap();
    assert!(matches!(small_model(&path, Overwrite::No), Err(Error::Exists { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    small_model(&path, Overwrite::Yes).unwrap();
    assert!(Reader::open(&path).is_ok());
    // An output that appears while we write is kept too.
    let late = directory.path().join("late.safetensors");
    let plan = vec![PlannedTensor::new("a", StoredDType::U8, [1])];
    let mut writer = Writer::create(&late, Overwrite::No, plan, BTreeMap::new()).unwrap();
    writer.write("a", &[1]).unwrap();
    fs::write(&late, "precious").unwrap();
    assert!(matches!(writer.finish(), Err(Error::Exists { .. })));
    assert_eq!(fs::read(&late).unwrap(), b"precious");
    assert_eq!(entries(directory.path()), ["late.safetensors", "m.safetensors"]);
    // Neither a directory nor a path without its directory can be written.
    let error = small_model(directory.path(), Overwrite::Yes).unwrap_err().to_string();
    assert!(error.contains("is a directory"), "{error}");
    let error = small_model(&directory.path().join("no/m.safetensors"), Overwrite::No).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if path.ends_with("no")), "{error}");
}

#[test]
fn an_unfinished_writer_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    let plan = || vec![PlannedTensor::new("a", StoredDType::U16, [2]), PlannedTensor::new("b", StoredDType::U8, [1])];
    let begin = || Writer::create(&path, Overwrite::No, plan(), BTreeMap::new()).unwrap();
    let mut writer = begin();
    writer.write_elements("a", &[1u16, 2]).unwrap();
    // The file has a temporary name, or none.
    let during = entries(directory.path());
    assert!(during.iter().all(|name| name.starts_with(TEMP_PREFIX) && name.ends_with(TEMP_SUFFIX)), "{during:?}");
    assert!(during.len() <= 1, "{during:?}");
    for (error, expected) in [
        (writer.write("a", &[0; 4]).unwrap_err(), "tensor `a` was written already"),
        (writer.write("c", &[0; 4]).unwrap_err(), "tensor `c` is not among the planned"),
        (writer.write("b", &[0; 4]).unwrap_err(), "tensor `b`: bytes to write: expected 1 elements, found 4"),
        (writer.write_elements("b", &[0i8]).unwrap_err(), "tensor `b`: expected dtype U8, found I8"),
        (writer.finish().unwrap_err(), "tensor `b` was planned and never written"),
    ] {
        assert!(error.to_string().contains(expected), "{error}");
    }
    drop(begin());
    assert!(entries(directory.path()).is_empty());
}

#[test]
fn impossible_plans_are_refused() {
    let refusal = |plan: Plan| {
        let directory = tempfile::tempdir().unwrap();
        let error = Writer::create(directory.path().join("m"), Overwrite::No, plan, BTreeMap::new()).unwrap_err();
        assert!(entries(directory.path()).is_empty());
        error.to_string()
    };
    let tensor = |name: &str, shape: &[usize]| PlannedTensor::new(name, StoredDType::F32, shape);
    assert!(refusal(vec![tensor("a", &[1]), tensor("a", &[2])].into()).contains("two tensors would be named `a`"));
    assert!(refusal(vec![tensor("__metadata__", &[1])].into()).contains("no tensor may be named"));
    assert!(refusal(vec![tensor("a", &[usize::MAX, 2])].into()).contains("cannot be stored"));
    let weight = || CompressedInfo::new("w", DataType::F32, 1, 4).unwrap();
    let mut both = Plan::new();
    both.compressed(weight()).tensor(tensor("w", &[1]));
    assert!(refusal(both).contains("both compressed and dense"));
    let mut clash = Plan::new();
    clash.compressed(weight()).tensor(tensor("w.meta", &[1]));
    assert!(refusal(clash).contains("two tensors would be named `w.meta`"));
    assert!(matches!(CompressedInfo::new("w", DataType::F32, 0, 4), Err(Error::EmptyWeight { .. })));
    assert!(matches!(CompressedInfo::new("w", DataType::F32, usize::MAX, 2), Err(Error::TooLarge { .. })));
}

/// The error of a file whose manifest says `to` where it said `from`.
pub(super) fn refusal_of(bytes: &[u8], from: &str, to: &str) -> String {
    let [from, to] = [from, to].map(|text| text.replace('"', "\\\""));
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
    let mut damaged = bytes.to_vec();
    damaged[at..at + from.len()].copy_from_slice(to.as_bytes());
    Reader::from_bytes("m.safetensors", damaged).unwrap_err().to_string()
}

#[test]
fn false_manifests_are_named() {
    let bytes = small_model_bytes();
    for (from, to, expected) in [
        (r#""version":1"#, r#""version":3"#, "format version 3 is newer than this program, which reads up to 2"),
        (r#""version":1"#, r#""version":0"#, "`version` is not a positive whole number"),
        (r#""weights":"#, r#""waights":"#, "missing field `weights`"),
        (r#""2:4""#, r#""1:4""#, "compressed weight `down`: pattern 1:4"),
        (r#""2:4""#, r#""4:2""#, "compressed weight `down`: pattern `4:2`"),
        (r#""BF16""#, r#""BF17""#, "compressed weight `up`: dtype `BF17` is unknown"),
        (r#""shape":[6,10]"#, r#""shape":[6,20]"#, "its tensor `up.values` should be BF16 [6, 10] and is BF16 [6, 6]"),
        (r#""shape":[6,10]"#, r#""shape":[0,10]"#, "has no elements"),
        (r#""up":{"#, r#""uq":{"#, "compressed weight `uq`: its tensor `uq.values` is missing"),
    ] {
        let message = refusal_of(&bytes, from, to);
        assert!(message.starts_with("m.safetensors: ") && message.contains(expected), "{from}: {message}");
    }
}

#[test]
fn damaged_metadata_words_name_file_and_tensor() {
    let mut bytes = small_model_bytes();
    let header = Header::parse(Path::new("m"), &bytes).unwrap();
    let meta = header.tensors().iter().find(|t| t.name == "up.meta").unwrap();
    let at = header.range(meta).start;
    bytes[at] = 0x40;
    let reader = Reader::from_bytes("m.safetensors", bytes).unwrap();
    let message = reader.compressed::<bf16>("up").unwrap_err().to_string();
    assert!(message.starts_with("m.safetensors: tensor `up`: row 0, group 0: metadata code 0x0"), "{message}");
}

#[test]
fn only_regular_files_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let refusal = |path: &Path| Reader::open(path).unwrap_err().to_string();
    assert!(refusal(directory.path()).contains("holds no .safetensors file"));
    assert!(refusal(&directory.path().join("absent")).contains("opening: No such file"));
    assert!(refusal(&directory.path().join("absent.safetensors.index.json")).contains("reading the index"));
    let odd = directory.path().join("odd.safetensors");
    fs::create_dir(&odd).unwrap();
    assert!(refusal(directory.path()).contains("is a directory, not a file"));
    #[cfg(target_os = "linux")]
    assert!(refusal(Path::new("/dev/zero")).contains("is not a regular file"));
    fs::remove_dir(&odd).unwrap();
    fs::write(&odd, "").unwrap();
    assert!(refusal(&odd).contains("is empty"));
    let outside = tempfile::tempdir().unwrap();
    for folder in ["last", "model"] {
        fs::create_dir(outside.path().join(folder)).unwrap();
    }
    assert!(refusal(outside.path()).ends_with("holds no .safetensors file"));
    fs::copy(&odd, outside.path().join("model/model.safetensors")).unwrap();
    assert!(refusal(outside.path()).contains("but these folders in it do: model; name one of them"));
    fs::write(directory.path().join("second.safetensors"), "").unwrap();
    assert!(refusal(directory.path()).contains("holds 2 .safetensors files and no index"));
    // One shard of several is no model; a file and an index of the same name may be of two models.
    let shards = tempfile::tempdir().unwrap();
    small_model(&shards.path().join("model-00002-of-00004.safetensors"), Overwrite::No).unwrap();
    assert!(refusal(shards.path()).contains("model-00002-of-00004.safetensors, one of 4 shards, and no index"));
    let whole = tempfile::tempdir().unwrap();
    small_model(&whole.path().join("model-00001-of-00001.safetensors"), Overwrite::No).unwrap();
    Reader::open(whole.path()).unwrap();
    let both = tempfile::tempdir().unwrap();
    small_model(&both.path().join("model.safetensors"), Overwrite::No).unwrap();
    let index = |shard: &str| format!(r#"{{"weight_map": {{"norm": "{shard}"}}}}"#);
    fs::write(both.path().join("model.safetensors.index.json"), index("model-00001-of-00002.safetensors")).unwrap();
    assert!(refusal(both.path()).contains("model.safetensors and an index of that name, which names other files"));
    // An index of one shard, whose file has the model's name: some tools write it.
    let names: Vec<_> =
        Reader::open(both.path().join("model.safetensors")).unwrap().tensors().map(|t| t.name.clone()).collect();
    let map: Vec<String> = names.iter().map(|name| format!("\"{name}\": \"model.safetensors\"")).collect();
    let whole = format!(r#"{{"weight_map": {{{}}}}}"#, map.join(", "));
    fs::write(both.path().join("model.safetensors.index.json"), whole).unwrap();
    Reader::open(both.path()).unwrap();
}

/// Whatever a link leads to: neither it nor the link is lost.
#[cfg(unix)]
#[test]
fn links_devices_and_pipes_are_not_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    small_model(&at("file.safetensors"), Overwrite::No).unwrap();
    let before = fs::read(at("file.safetensors")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    let open = fs::File::open(at("file.safetensors")).unwrap();
    let descriptor = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open));
    let links = ["/dev/null", "file.safetensors", "nothing", "folder", "link.safetensors", &descriptor];
    for target in links.map(std::path::Path::new) {
        let link = at("link.safetensors");
        std::os::unix::fs::symlink(target, &link).unwrap();
        let error = small_model(&link, Overwrite::Yes).unwrap_err().to_string();
        assert!(error.contains("is a symbolic link") || error.contains("is a directory"), "{error}");
        assert_eq!(fs::read_link(&link).unwrap(), target);
        assert!(matches!(small_model(&link, Overwrite::No), Err(Error::Exists { .. } | Error::Format { .. })));
        fs::remove_file(&link).unwrap();
    }
    assert_eq!(fs::read(at("file.safetensors")).unwrap(), before);
    assert!(!at("nothing").exists());
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    let error = small_model(&at("socket"), Overwrite::Yes).unwrap_err().to_string();
    assert!(error.contains("a device, a pipe or a socket"), "{error}");
}

#[test]
fn a_file_that_changes_under_the_reader_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.safetensors");
    small_model(&path, Overwrite::No).unwrap();
    let reader = Reader::open(&path).unwrap();
    let view = reader.tensor("norm").unwrap();
    assert!(view.bytes().is_ok());
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(16).unwrap();
    let message = reader.tensor("norm").unwrap_err().to_string();
    assert_eq!(view.elements::<f32>().unwrap_err().to_string(), message);
    assert!(message.contains("was changed while it was being read"), "{message}");
    // A file that is replaced, as our writer does, goes on being what it was.
    small_model(&path, Overwrite::Yes).unwrap();
    let reader = Reader::open(&path).unwrap();
    small_model(&path, Overwrite::Yes).unwrap();
    assert!(reader.tensor("norm").is_ok());
}

proptest! {
    /// Random damage gives an error or tensors that lie inside the file; never a panic.
    #[test]
    fn damage_never_panics(
        places in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        header_only in any::<bool>(),
        cut in prop_oneof![3 => Just(None), 1 => any::<prop::sample::Index>().prop_map(Some)],
    ) {
        thread_local!(static MODEL: Vec<u8> = small_model_bytes());
        let mut bytes = MODEL.with(Clone::clone);
        let reach = if header_only { 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize } else { bytes.len() };
        for (at, byte) in places {
            bytes[at.index(reach)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let length = bytes.len();
        if let Ok(reader) = Reader::from_bytes("m", bytes) {
            prop_assert!(reader.tensors().map(|t| reader.tensor(&t.name).unwrap().bytes().unwrap().len()).sum::<usize>() < length);
            for weight in reader.compressed_weights() {
                prop_assert!(weight.rows * weight.cols > 0);
                let dense = match weight.format {
                    ValueFormat::Plain(DataType::BF16) => reader.compressed::<bf16>(&weight.name).map(|c| c.to_dense().len()),
                    ValueFormat::Plain(DataType::I8) | ValueFormat::ScaledI8 => reader.compressed::<i8>(&weight.name).map(|c| c.to_dense().len()),
                    _ => continue,
                };
                if let Ok(dense) = dense {
                    prop_assert_eq!(dense, weight.rows * weight.cols);
                }
            }
        }
    }
}
