//! `shrink`, against the same models with zeros in the place of what was removed.

use std::{fs, path::PathBuf};

use crate::support::{self, checkpoint, letters, names, read_json, run};
use serde_json::Value;
use twofour::file::Reader;
use twofour_nn::model::{Checkpoint, EncoderCheckpoint};

fn list(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|index| index.as_u64().unwrap() as usize).collect()
}

/// The weight of that name with zeros for some inputs; nothing for other weights.
fn zeroed(checkpoint: &Checkpoint, name: &str, inputs: &[usize]) -> Vec<f32> {
    let (reader, is_transposed) = (checkpoint.reader(), name.contains(".c_"));
    let view = reader.tensor(name).unwrap();
    let cols = view.info.shape[1];
    let mut values: Vec<f32> = match view.info.dtype {
        twofour::file::StoredDType::F32 => view.to_vec().unwrap(),
        twofour::file::StoredDType::F16 => view.to_vec::<half::f16>().unwrap().iter().map(|v| v.to_f32()).collect(),
        _ => view.to_vec::<half::bf16>().unwrap().iter().map(|v| v.to_f32()).collect(),
    };
    for (index, value) in values.iter_mut().enumerate() {
        let input = if is_transposed { index / cols } else { index % cols };
        if inputs.contains(&input) {
            *value = 0.0;
        }
    }
    values
}

#[test]
fn a_smaller_decoder_computes_what_zeros_in_the_dense_one_do() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(2000)).unwrap();
    let calibration = ["--calibration", "text.txt", "--samples", "4", "--length", "16"];
    for (family, sizes) in [
        ("llama", &["--features", "15", "--heads", "2"][..]),
        ("llama", &["--kv-heads", "1"]),
        ("mistral", &["--features", "1", "--heads", "2", "--kv-heads", "1"]),
        ("qwen2", &["--features", "16", "--kv-heads", "1"]),
        ("qwen3", &["--heads", "1", "--kv-heads", "1"]),
        ("gemma2", &["--features", "8", "--kv-heads", "1"]),
        ("gemma3", &["--features", "23", "--heads", "2"]),
        ("gpt2", &["--features", "17"]),
    ] {
        let model = checkpoint(family);
        for more in [&[][..], &calibration] {
            let command = [&["shrink", &model, "-o", "small", "--force", "--json"], sizes, more].concat();
            let answer = run(at, &command).good().json();
            let method = if more.is_empty() { "magnitude" } else { "wanda" };
            assert_eq!(answer["method"], method);
            assert_eq!(names(&at.join("small")), names(model.as_ref()), "{family}");
            let [dense, small] = [PathBuf::from(&model), at.join("small")].map(|path| Checkpoint::open(path).unwrap());
            let (config, after) = (small.config(), &answer["after"]);
            assert_eq!(after["features"], config.feed_forward.hidden);
            assert_eq!(after["heads"], config.attention.heads);
            assert_eq!(after["kv_heads"], config.attention.kv_heads);
            assert_eq!(config.attention.head_dim, dense.config().attention.head_dim);
            let bytes: usize = small.reader().tensors().map(|tensor| tensor.bytes).sum();
            assert_eq!(after["bytes"], bytes);
            assert!(answer["after"]["parameters"].as_u64() < answer["before"]["parameters"].as_u64());

            let (blocks, d) = (answer["blocks"].as_array().unwrap(), config.attention.head_dim);
            let replace = |name: &str| {
                let block = name.split('.').find_map(|part| part.parse::<usize>().ok())?;
                let is = |endings: [&str; 2]| endings.iter().any(|ending| name.ends_with(ending));
                if is(["mlp.down_proj.weight", "mlp.c_proj.weight"]) {
                    return Some(zeroed(&dense, name, &list(&blocks[block]["removed_features"])));
                }
                let heads = list(&blocks[block]["removed_heads"]);
                let inputs: Vec<usize> = heads.iter().flat_map(|head| head * d..(head + 1) * d).collect();
                is(["o_proj.weight", "attn.c_proj.weight"]).then(|| zeroed(&dense, name, &inputs))
            };
            let tokens = [3u32, 5, 7, 11, 13, 17, 19, 23, 29, 2];
            let expected = dense.inference_with::<f32>(&replace).unwrap().session().logits(&tokens).unwrap();
            let found = small.inference::<f32>().unwrap().session().logits(&tokens).unwrap();
            assert_eq!(found.len(), expected.len());
            let far = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far < 2e-5, "{family} {sizes:?}: {far}");
        }
        fs::remove_dir_all(at.join("small")).unwrap();
    }
}

/// Parts that add nothing go first, by either score.
#[test]
fn what_adds_nothing_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(2000)).unwrap();
    fs::create_dir(at.join("model")).unwrap();
    for name in ["config.json", "tokenizer.json"] {
        fs::copy(PathBuf::from(checkpoint("llama")).join(name), at.join("model").join(name)).unwrap();
    }
    let dense = Checkpoint::open(checkpoint("llama")).unwrap();
    let tensors: Vec<(String, support::Floats)> = dense
        .reader()
        .tensors()
        .map(|tensor| {
            let values = dense.reader().tensor(&tensor.name).unwrap().to_vec::<f32>().unwrap();
            let is_free = ["down_proj.weight", "up_proj.weight", "gate_proj.weight", "up_proj.bias", "gate_proj.bias"];
            let is_free = is_free.iter().any(|ending| tensor.name.ends_with(ending));
            let cols = tensor.shape.get(1).copied().unwrap_or(1);
            let values = values.iter().enumerate().map(|(index, value)| {
                let feature = if tensor.name.ends_with("down_proj.weight") { index % cols } else { index / cols };
                let head = index % cols / 4;
                let is_out = tensor.name.ends_with("o_proj.weight") && head == 2;
                if is_free && [3, 11].contains(&feature) || is_out { 0.0 } else { *value }
            });
            (tensor.name.clone(), (tensor.shape.clone(), values.collect()))
        })
        .collect();
    let views: Vec<(&str, support::Floats)> = tensors.iter().map(|(name, t)| (name.as_str(), t.clone())).collect();
    support::write(&at.join("model/model.safetensors"), &views);
    let shrink = ["shrink", "model", "-o", "small", "--features", "22", "--json"];
    let by_inputs =
        ["--heads", "2", "--kv-heads", "2", "--calibration", "text.txt", "--samples", "4", "--length", "16"];
    for more in [&[][..], &by_inputs] {
        let answer = run(at, &[&shrink[..], more].concat()).good().json();
        for block in answer["blocks"].as_array().unwrap() {
            assert_eq!(list(&block["removed_features"]), [3, 11]);
            assert_eq!(block["kept_of_features"], 1.0);
            assert!(more.is_empty() || list(&block["removed_heads"]).contains(&2), "{block}");
        }
        fs::remove_dir_all(at.join("small")).unwrap();
    }
}

#[test]
fn other_forms_shrink_and_say_what_went() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let gguf = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../twofour/tests/fixtures/gguf/llama.gguf");
    run(at, &["shrink", &gguf.to_string_lossy(), "-o", "small", "--features", "16"]).good();
    assert_eq!(Checkpoint::open(at.join("small")).unwrap().config().feed_forward.hidden, 16);
    let shown = run(at, &["shrink", &checkpoint("bert"), "-o", "bert", "--features", "12"]).good().stdout;
    assert!(shown.contains("hidden features of a block: 24 -> 12") && shown.contains("parameters"), "{shown}");
    assert_eq!(EncoderCheckpoint::open(at.join("bert")).unwrap().config().feed_forward.hidden, 12);
    let shown = run(at, &["shrink", &checkpoint("qwen2"), "-o", "qwen2", "--kv-heads", "1", "-v"]).good().stdout;
    assert!(shown.contains("heads removed"), "{shown}");
    let config = read_json(at.join("qwen2/config.json"));
    assert_eq!((&config["head_dim"], &config["num_attention_heads"]), (&4.into(), &2.into()));
    // What did not change is written as it was, in its order.
    let before = read_json(PathBuf::from(checkpoint("qwen2")).join("config.json"));
    for (name, value) in before.as_object().unwrap() {
        let is_size = ["num_attention_heads", "num_key_value_heads"].contains(&name.as_str());
        assert!(is_size || config[name] == *value, "{name}");
    }
    // And it prunes.
    run(at, &["prune", "small", "-o", "pruned"]).good();
    run(at, &["check", "pruned"]).good();
}

#[test]
fn what_config_json_cannot_say_is_refused_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(2000)).unwrap();
    let [llama, gpt2, bert, vit] = ["llama", "gpt2", "bert", "vit"].map(checkpoint);
    let bad = |code: i32, model: &str, more: &[&str], expected: &str| {
        let message = run(at, &[&["shrink", model, "-o", "out"], more].concat()).bad(code);
        assert!(message.contains(expected), "{more:?}: {message}");
        assert!(!at.join("out").exists(), "{message}");
    };
    bad(2, &llama, &[], "--features");
    bad(1, &llama, &["--features", "24"], "nothing would be removed");
    bad(1, &llama, &["--features", "0"], "from 1");
    bad(1, &llama, &["--features", "25"], "25 of 24");
    bad(1, &llama, &["--heads", "3"], "a multiple");
    bad(1, &llama, &["--heads", "0"], "a multiple");
    bad(1, &llama, &["--kv-heads", "0"], "from 1");
    bad(1, &llama, &["--kv-heads", "3"], "from 1");
    bad(1, &llama, &["--heads", "4", "--kv-heads", "1"], "at most as many");
    bad(2, &llama, &["--kv-heads", "99999999999999999999"], "invalid value");
    bad(1, &gpt2, &["--heads", "2"], "size of a head");
    bad(1, &bert, &["--heads", "2"], "size of a head");
    bad(1, &vit, &["--features", "8"], "vit");
    bad(2, &llama, &["--features", "8", "--method", "wanda"], "--calibration");
    let by_magnitude = ["--features", "8", "--method", "magnitude", "--calibration", "text.txt"];
    bad(2, &llama, &by_magnitude, "no effect");
    bad(1, &llama, &["--features", "8", "--calibration", "absent.txt"], "absent.txt");
    let file = format!("{gpt2}/model.safetensors");
    bad(2, &file, &["--features", "8"], "name a directory");
    let message = run(at, &["shrink", &llama, "-o", "out.safetensors", "--features", "8"]).bad(2);
    assert!(message.contains("name a directory"), "{message}");
    run(at, &["prune", &llama, "-o", "pruned"]).good();
    run(at, &["compress", "pruned", "-o", "packed"]).good();
    bad(1, "packed", &["--features", "8"], "decompress the model");
    assert!(Reader::open(at.join("packed")).unwrap().compressed_weights().next().is_some());
}
