//! Directories: what they are named, what they say of themselves, and what is beside the model.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::super::{tests::run, *};
use crate::{Error, Selector, int4::Granularity, quantization::ScaleRule};

const CONFIG: &str = "{\n  \"model_type\": \"llama\",\n  \"eps\": 1e-05,\n  \"vocab_size\": 4\n}";

fn write(path: &Path, tensors: &[(&str, [usize; 2])]) {
    let plan: Vec<_> =
        tensors.iter().map(|(name, shape)| PlannedTensor::new(*name, StoredDType::F32, *shape)).collect();
    let mut writer = Writer::create(path, Overwrite::Yes, plan, BTreeMap::new()).unwrap();
    for (name, [rows, cols]) in tensors {
        // 2:4 along rows, and not where a name says so.
        let at = |i: usize| if name.contains("dense") || i % 4 < 2 { 1.0 + (i % 7) as f32 } else { 0.0 };
        let values: Vec<f32> = (0..rows * cols).map(at).collect();
        writer.write_elements(name, &values).unwrap();
    }
    writer.finish().unwrap();
}

/// A checkpoint in one file, or in two with an index.
fn checkpoint(directory: &Path, is_sharded: bool) {
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join("config.json"), CONFIG).unwrap();
    fs::write(directory.join("tokenizer.json"), "{}").unwrap();
    let (first, second) = (("up.weight", [4, 8]), ("dense_embedding.weight", [4, 8]));
    if !is_sharded {
        return write(&directory.join("model.safetensors"), &[first, second]);
    }
    let [one, two] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    write(&directory.join(one), &[first]);
    write(&directory.join(two), &[second]);
    let index = json!({"metadata": {}, "weight_map": {"up.weight": one, "dense_embedding.weight": two}});
    fs::write(directory.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

/// Paths of all files and directories, relative and sorted.
fn tree(directory: &Path) -> Vec<String> {
    fn walk(top: &Path, inside: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(top.join(inside)).unwrap() {
            let entry = entry.unwrap();
            let relative = inside.join(entry.file_name());
            found.push(relative.display().to_string());
            if entry.file_type().unwrap().is_dir() {
                walk(top, &relative, found);
            }
        }
    }
    let mut found = Vec::new();
    walk(directory, Path::new(""), &mut found);
    found.sort();
    found
}

fn is_linear(tensor: &TensorInfo) -> bool {
    tensor.name == "up.weight"
}

fn small(from: &Path, to: &Path) -> crate::Result<Report<MadeCompressed>> {
    run(from, to, Overwrite::No, Compress { which: &is_linear, ..Default::default() })
}

fn configuration(directory: &Path) -> Value {
    serde_json::from_slice(&fs::read(directory.join("config.json")).unwrap()).unwrap()
}

#[test]
fn a_packed_directory_says_so_and_decompressing_takes_all_of_it_back() {
    for is_sharded in [false, true] {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        checkpoint(&at("in"), is_sharded);
        small(&at("in"), &at("small")).unwrap();
        let weights = tree(&at("in"))
            .into_iter()
            .map(|name| if name.contains("safetensors") { format!("twofour-{name}") } else { name });
        let mut expected: Vec<String> = weights.chain(["README-twofour.md".to_owned()]).collect();
        expected.sort();
        assert_eq!(tree(&at("small")), expected);
        let mut config: Value = serde_json::from_str(CONFIG).unwrap();
        config["quantization_config"] =
            json!({"quant_method": "twofour", "modules_to_not_convert": ["dense_embedding"]});
        assert_eq!(configuration(&at("small")), config);
        let reader = Reader::open(at("small")).unwrap();
        assert_eq!(reader.compressed_weights().count(), 1);
        if let Some((_, index)) = reader.index() {
            assert!(index.shards().iter().all(|shard| shard.starts_with("twofour-model-")));
        }

        run(at("small"), at("back"), Overwrite::No, Decompress).unwrap();
        assert_eq!(tree(&at("back")), tree(&at("in")));
        for name in tree(&at("in")).iter().filter(|name| !name.ends_with("index.json")) {
            let read = |directory: &str| fs::read(at(directory).join(name)).unwrap();
            if name == "config.json" {
                assert_eq!(configuration(&at("back")), configuration(&at("in")));
            } else {
                assert_eq!(read("back"), read("in"), "{name}");
            }
        }
        // A dense output of a packed directory, and what is quantized.
        let options = Quantize {
            which: &|name, _, _| name == "up.weight",
            dense: &|name, _, _| name == "dense_embedding.weight",
            to: Quantization::Int4(Granularity::Row),
            rule: ScaleRule::MaxAbs,
        };
        run(at("small"), at("int4"), Overwrite::No, options).unwrap();
        assert_eq!(tree(&at("int4")), tree(&at("small")));
        assert_eq!(configuration(&at("int4")), config);
        run(at("int4"), at("int4-dense"), Overwrite::No, Decompress).unwrap();
        assert_eq!(tree(&at("int4-dense")), tree(&at("in")));
        assert!(Reader::open(at("int4-dense")).unwrap().tensors().all(|tensor| tensor.dtype == StoredDType::F32));
    }
}

#[test]
fn dense_integers_alone_make_a_directory_packed() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    checkpoint(&at("in"), false);
    let options = Quantize {
        which: &|_, _, _| false,
        dense: &|name, _, _| name == "dense_embedding.weight",
        to: Quantization::Int8(Granularity::Row),
        rule: ScaleRule::MaxAbs,
    };
    run(at("in"), at("out"), Overwrite::No, options).unwrap();
    assert!(tree(&at("out")).contains(&"twofour-model.safetensors".to_owned()));
    assert_eq!(configuration(&at("out"))["quantization_config"]["quant_method"], "twofour");
    run(at("out"), at("back"), Overwrite::No, Decompress).unwrap();
    assert_eq!(tree(&at("back")), tree(&at("in")));
}

#[test]
fn old_names_are_read_and_both_together_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    for is_sharded in [false, true] {
        let input = at(&format!("in-{is_sharded}"));
        checkpoint(&input, is_sharded);
        let old = at(&format!("old-{is_sharded}"));
        small(&input, &old).unwrap();
        let renamed = |text: String| text.replace("twofour-model", "model");
        for name in tree(&old).iter().filter(|name| name.contains("safetensors")) {
            if name.ends_with("json") {
                let text = fs::read_to_string(old.join(name)).unwrap();
                fs::write(old.join(name), renamed(text)).unwrap();
            }
            fs::rename(old.join(name), old.join(renamed(name.clone()))).unwrap();
        }
        assert_eq!(Reader::open(&old).unwrap().compressed_weights().count(), 1);
        let back = at(&format!("back-{is_sharded}"));
        run(&old, &back, Overwrite::No, Decompress).unwrap();
        assert_eq!(tree(&back), tree(&input));
    }
    small(&at("in-false"), &at("both")).unwrap();
    fs::copy(at("in-false/model.safetensors"), at("both/model.safetensors")).unwrap();
    let message = Reader::open(at("both")).unwrap_err().to_string();
    assert!(message.contains("`twofour-model.safetensors`") && message.contains("`model.safetensors`"), "{message}");
    // Each of them can be named.
    assert_eq!(Reader::open(at("both/twofour-model.safetensors")).unwrap().compressed_weights().count(), 1);
    assert_eq!(Reader::open(at("both/model.safetensors")).unwrap().compressed_weights().count(), 0);
}

#[test]
fn what_another_tool_stored_is_not_described_anew() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    checkpoint(&at("in"), false);
    let with = |field: Value| {
        let mut config: Value = serde_json::from_str(CONFIG).unwrap();
        config["quantization_config"] = field;
        fs::write(at("in/config.json"), config.to_string()).unwrap();
    };
    with(json!({"quant_method": "gptq", "bits": 4}));
    let message = small(&at("in"), &at("out")).unwrap_err().to_string();
    assert!(message.contains("config.json") && message.contains("gptq, 4 bits"), "{message}");
    assert!(!at("out").exists());
    // Pruning changes no type: what the field says stays true.
    run(at("in"), at("pruned"), Overwrite::No, Prune::new(|_| Some(Selector::TWO_FOUR))).unwrap();
    assert_eq!(configuration(&at("pruned")), configuration(&at("in")));
    // llm-compressor's vestige describes nothing.
    with(
        json!({"quant_method": "compressed-tensors", "sparsity_config": {"format": "dense", "sparsity_structure": "2:4"}}),
    );
    small(&at("in"), &at("small")).unwrap();
    assert_eq!(configuration(&at("small"))["quantization_config"]["quant_method"], "twofour");
    for (name, from) in [("dense", "in"), ("back", "small")] {
        if name == "dense" {
            run(at(from), at(name), Overwrite::No, Prune::new(|_| None)).unwrap();
        } else {
            run(at(from), at(name), Overwrite::No, Decompress).unwrap();
        }
        assert!(configuration(&at(name)).get("quantization_config").is_none(), "{name}");
    }
    // Without a configuration there is none to write, and a damaged one is an error.
    fs::remove_file(at("in/config.json")).unwrap();
    small(&at("in"), &at("bare")).unwrap();
    assert!(!at("bare/config.json").exists() && at("bare/twofour-model.safetensors").exists());
    fs::write(at("in/config.json"), "{").unwrap();
    assert!(small(&at("in"), &at("no")).unwrap_err().to_string().contains("config.json: is no JSON"));
    #[cfg(unix)]
    {
        fs::remove_file(at("in/config.json")).unwrap();
        std::os::unix::fs::symlink("gone", at("in/config.json")).unwrap();
        assert!(matches!(small(&at("in"), &at("no")), Err(Error::Io { path, .. }) if path.ends_with("config.json")));
    }
    assert!(!at("no").exists());
}

#[test]
fn the_model_of_a_directory_is_found_beside_others() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    for is_sharded in [false, true] {
        let input = at(&format!("{is_sharded}"));
        checkpoint(&input, is_sharded);
        let found = Reader::open(&input).unwrap().path().to_owned();
        let before = tree(&input);
        for name in [
            "consolidated.safetensors",
            "model.fp16.safetensors",
            "model.fp16-00001-of-00002.safetensors",
            "adapter_model.safetensors",
            "value_head.safetensors",
            "optimizer.safetensors",
        ] {
            write(&input.join(name), &[("other.weight", [4, 8])]);
        }
        fs::write(input.join("model.safetensors.index.fp16.json"), "{}").unwrap();
        fs::write(input.join("consolidated.safetensors.index.json"), "{}").unwrap();
        assert_eq!(Reader::open(&input).unwrap().path(), found);
        let out = at(&format!("{is_sharded}-out"));
        run(&input, &out, Overwrite::No, Prune::new(|_| None)).unwrap();
        let mut expected =
            [&before[..], &["adapter_model", "optimizer", "value_head"].map(|name| format!("{name}.safetensors"))]
                .concat();
        expected.sort();
        assert_eq!(tree(&out), expected);
        // Again in the same place.
        run(&input, &out, Overwrite::Yes, Prune::new(|_| None)).unwrap();
        assert_eq!(tree(&out), expected);
        let beside = Beside::of(&Reader::open(&input).unwrap(), &out).unwrap();
        assert_eq!(beside.weights.len(), 3);
        let left_out: Vec<_> = beside.left_out.iter().map(|left| left.path.display().to_string()).collect();
        assert_eq!(left_out.len(), 5, "{left_out:?}");
    }
    let lone = at("lone");
    fs::create_dir(&lone).unwrap();
    write(&lone.join("adapter_model.safetensors"), &[("a", [1, 4])]);
    assert!(Reader::open(&lone).unwrap_err().to_string().contains("changes the weights of a model, and no model"));
    write(&lone.join("b.safetensors"), &[("a", [1, 4])]);
    write(&lone.join("c.safetensors"), &[("a", [1, 4])]);
    let message = Reader::open(&lone).unwrap_err().to_string();
    assert!(message.contains("2 .safetensors files and no index: `b.safetensors`, `c.safetensors`"), "{message}");
}

#[test]
fn nothing_beside_the_model_is_lost_in_silence() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    checkpoint(&at("in"), false);
    let put = |name: &str| {
        let path = at("in").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    };
    let copied = [
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "3_Dense/pytorch_model.bin",
        "a/b/c/d/e/f/g/h/i/j/k.txt",
        "adapter_model.bin",
        "data.csv",
        "modules.json",
    ];
    let left_out = [
        ".cache/x",
        ".gitattributes",
        "checkpoint-500/model.safetensors",
        "global_step12/states.pt",
        "model.gguf",
        "onnx/model.onnx",
        "openvino/openvino_model.bin",
        "original/consolidated.00.pth",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ];
    copied.iter().chain(&left_out).for_each(|name| put(name));
    put("openvino/openvino_model.xml");
    put("checkpoint-best/notes.txt");
    fs::create_dir(at("in/2_Normalize")).unwrap();
    run(at("in"), at("out"), Overwrite::No, Prune::new(|_| Some(Selector::TWO_FOUR))).unwrap();
    for name in copied.iter().chain(&["openvino/openvino_model.xml", "checkpoint-best/notes.txt"]) {
        assert_eq!(fs::read_to_string(at("out").join(name)).unwrap(), *name);
    }
    for name in left_out {
        assert!(!at("out").join(name).exists(), "{name}");
    }
    for name in ["onnx", "original", "checkpoint-500", ".cache", ".twofour.lock"] {
        assert!(!at("out").join(name).exists(), "{name}");
    }
    assert!(at("out/2_Normalize").is_dir());
    let beside = Beside::of(&Reader::open(at("in")).unwrap(), &at("out")).unwrap();
    // What is left out is listed, itself or with the directory that holds it.
    for name in left_out {
        assert!(beside.left_out.iter().any(|left| Path::new(name).starts_with(&left.path)), "{name}: {beside:?}");
    }
    assert_eq!(beside.left_out.len(), left_out.len());
    let weights = ["2_Dense/model.safetensors", "3_Dense/pytorch_model.bin", "adapter_model.bin"].map(PathBuf::from);
    assert_eq!(beside.weights, weights);
    // An output inside its input is not copied into itself.
    run(at("in"), at("in/pruned"), Overwrite::No, Prune::new(|_| None)).unwrap();
    assert!(!at("in/pruned/pruned").exists() && at("in/pruned/2_Dense/model.safetensors").exists());
}

#[cfg(unix)]
#[test]
fn links_are_followed_to_files_and_lead_somewhere() {
    use std::os::unix::{fs::symlink, net::UnixListener};
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    // As the hub's cache has a snapshot.
    checkpoint(&at("blobs"), false);
    fs::create_dir_all(at("in/2_Dense")).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        symlink(at("blobs").join(name), at("in").join(name)).unwrap();
    }
    symlink(at("blobs/model.safetensors"), at("in/2_Dense/model.safetensors")).unwrap();
    symlink(at("blobs"), at("in/linked")).unwrap();
    let _socket = UnixListener::bind(at("in/socket")).unwrap();
    small(&at("in"), &at("out")).unwrap();
    assert_eq!(
        tree(&at("out")),
        [
            "2_Dense",
            "2_Dense/model.safetensors",
            "README-twofour.md",
            "config.json",
            "tokenizer.json",
            "twofour-model.safetensors"
        ]
    );
    assert!(fs::symlink_metadata(at("out/tokenizer.json")).unwrap().is_file());
    let beside = Beside::of(&Reader::open(at("in")).unwrap(), &at("out")).unwrap();
    let reasons: Vec<_> = beside.left_out.iter().map(|left| left.reason).collect();
    assert_eq!(reasons, ["a link to a directory", "no regular file"]);
    symlink("gone", at("in/vocab.txt")).unwrap();
    let error = small(&at("in"), &at("no")).unwrap_err().to_string();
    assert!(error.contains("vocab.txt: following the link, which leads nowhere"), "{error}");
    assert!(!at("no").exists());
}

#[test]
fn one_process_writes_to_a_directory_and_the_next_clears_up_after_a_kill() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    checkpoint(&at("in"), true);
    fs::create_dir(at("in/2_Dense")).unwrap();
    fs::write(at("in/2_Dense/config.json"), "{}").unwrap();
    let convert = |overwrite| run(at("in"), at("out"), overwrite, Prune::new(|_| None));
    fs::create_dir(at("out")).unwrap();
    let lock = DirectoryLock::acquire(&at("out")).unwrap();
    for overwrite in [Overwrite::No, Overwrite::Yes] {
        assert!(matches!(convert(overwrite), Err(Error::Busy { .. })));
    }
    drop(lock);
    convert(Overwrite::No).unwrap();
    assert_eq!(tree(&at("out")), tree(&at("in")));
    assert!(matches!(convert(Overwrite::No), Err(Error::Exists { .. })));

    // A kill before the first name, and one between two names.
    let announced: Vec<String> = tree(&at("out"));
    for left in [vec![], announced.clone(), announced[..3].to_vec()] {
        fs::remove_dir_all(at("out")).unwrap();
        fs::create_dir_all(at("out/.twofour-staging.tmp/2_Dense")).unwrap();
        fs::write(at("out/.twofour-x.tmp"), "half").unwrap();
        for name in &left {
            if at("in").join(name).is_dir() {
                fs::create_dir_all(at("out").join(name)).unwrap();
            } else {
                fs::write(at("out").join(name), "old").unwrap();
            }
        }
        let list = if left.is_empty() { String::new() } else { json!(announced).to_string() };
        fs::write(at("out/.twofour.lock"), list).unwrap();
        convert(Overwrite::No).unwrap();
        assert_eq!(tree(&at("out")), tree(&at("in")), "{left:?}");
        assert_ne!(fs::read(at("out/config.json")).unwrap(), b"old");
    }
    // What nobody announced is the user's.
    fs::write(at("out/.twofour.lock"), "").unwrap();
    assert!(matches!(convert(Overwrite::No), Err(Error::Exists { .. })));
    assert_eq!(tree(&at("out")), tree(&at("in")));
}
