//! `prune` by methods that run the model on text, on checkpoints as transformers writes them.

use std::fs;

use crate::support::{self, checkpoint, copy, letters, names, run};
use half::bf16;
use serde_json::Value;
use twofour::file::{Reader, StoredDType, ValueFormat};

#[test]
fn calibrated_methods_prune_every_layer_of_every_block() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(4000)).unwrap();
    for family in ["llama", "mistral", "qwen2", "qwen3", "gpt2", "bert"] {
        let model = checkpoint(family);
        let mut errors = Vec::new();
        let calibration = ["--calibration", "text.txt", "--samples", "12", "--length", "24", "--seed", "5"];
        for (method, refit) in [("wanda", "off"), ("ria", "off"), ("sparsegpt", "off"), ("alps", "10"), ("wanda", "10")]
        {
            let out = format!("{family}-{method}-{refit}");
            // Alone, with all that follows by default, and with what follows where it is asked for.
            let compensate = if (method, refit) == ("wanda", "10") { "0.5" } else { "off" };
            let settings = ["--method", method, "--refit", refit, "--compensate", compensate, "--tune", "0"];
            let arguments = [&["prune", &model, "-o", &out, "--json"], &settings[..]].concat();
            let answer = run(at, &[&arguments[..], &calibration].concat()).good().json();
            assert_eq!((&answer["method"], &answer["calibration_tokens"]), (&method.into(), &(12 * 24).into()));
            let tensors = answer["tensors"].as_array().unwrap();
            let pruned: Vec<_> = tensors.iter().filter(|t| t["pruned"] == true).collect();
            assert!(pruned.len() >= 8, "{family}: {answer}");
            for tensor in &pruned {
                assert_eq!(tensor["mask_density"], 0.5, "{family} {method}: {tensor}");
            }
            let error: f64 = pruned.iter().map(|t| t["relative_error"].as_f64().unwrap()).sum();
            errors.push(error / pruned.len() as f64);
            let axis = if family == "gpt2" { "column" } else { "row" };
            run(at, &["check", &out, "--axis", axis]).good();
            // The same files, and nothing of the calibration's own is left.
            assert_eq!(names(&at.join(&out)), names(model.as_ref()));
            assert!(!names(at).iter().any(|name| name.starts_with(".twofour")), "{:?}", names(at));
            // The same command gives the same bytes.
            let again = ["prune", &model, "-o", "again", "--force"];
            let again = [&again[..], &settings, &calibration].concat();
            run(at, &again).good();
            for name in names(&at.join(&out)) {
                let read = |folder: &str| fs::read(at.join(folder).join(&name)).unwrap();
                assert_eq!(read(&out), read("again"), "{name}");
            }
        }
        // The next family has files of other names.
        fs::remove_dir_all(at.join("again")).unwrap();
        assert!(errors[2] < errors[0] && errors[0] < 0.6, "{family}: Wanda, RIA, SparseGPT: {errors:?}");
        assert!(errors[3] < errors[2] && errors[4] < errors[0], "{family}: and ALPS, Wanda refitted: {errors:?}");
        // A calibration without a method is one by the default.
        let default = [&["prune", &model, "-o", "default", "--force", "--json"], &calibration[..]].concat();
        run(at, &[&default[..], &["--tune", "0"]].concat()).good();
        for name in names(&at.join("default")) {
            let read = |folder: &str| fs::read(at.join(folder).join(&name)).unwrap();
            assert_eq!(read("default"), read(&format!("{family}-alps-10")), "{name}");
        }
        // Decoders are tuned, too.
        let tuned = run(at, &default).good().json();
        let passes = if family == "bert" { Value::Null } else { 1.into() };
        assert_eq!(tuned["tuning"]["passes"], passes, "{family}");
        fs::remove_dir_all(at.join("default")).unwrap();
    }
}

/// What a tensor has for each of its rows, or columns.
fn parts(reader: &Reader, name: &str, by_columns: bool) -> Vec<Vec<f32>> {
    let tensor = reader.tensor(name).unwrap();
    let values: Vec<f32> = match tensor.info.dtype {
        StoredDType::BF16 => tensor.elements::<bf16>().unwrap().iter().map(|value| value.to_f32()).collect(),
        _ => tensor.to_vec().unwrap(),
    };
    let cols = tensor.info.shape.get(1).copied().unwrap_or(1);
    match by_columns {
        false => values.chunks(cols).map(<[f32]>::to_vec).collect(),
        true => (0..cols).map(|col| values.iter().skip(col).step_by(cols).copied().collect()).collect(),
    }
}

/// What was put in another order is in that order everywhere, so that the dense model would compute what it did.
#[test]
fn hidden_features_are_put_in_another_order_with_the_layers_before_them() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(4000)).unwrap();
    let calibration = ["--calibration", "text.txt", "--samples", "12", "--length", "24"];
    for (family, down, before) in [
        ("llama", "model.layers.0.mlp.down_proj", &["model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"][..]),
        ("qwen2", "model.layers.1.mlp.down_proj", &["model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj"]),
        ("gpt2", "transformer.h.0.mlp.c_proj", &["transformer.h.0.mlp.c_fc"]),
        ("bert", "encoder.layer.1.output.dense", &["encoder.layer.1.intermediate.dense"]),
    ] {
        let (model, down) = (checkpoint(family), format!("{down}.weight"));
        // Kept elements stay what they are, so that columns can be told.
        let alone = ["--method", "wanda", "--refit", "off", "--tune", "0", "--include", &down];
        let [auto, off] = ["auto", "off"].map(|permute| format!("{family}-{permute}"));
        let of = |out: &str, permute: &str| {
            let permute = ["--permute", permute];
            let command = [&["prune", &model, "-o", out, "--json"], &alone[..], &calibration, &permute];
            run(at, &command.concat()).good().json()
        };
        assert!(of(&off, "off")["reordered"].is_null());
        assert!(of(&auto, "auto")["reordered"].as_u64().unwrap() > before.len() as u64, "{family}");
        let [stored, auto, off] = [&model, &auto, &off].map(|path| Reader::open(at.join(path)).unwrap());
        let is_transposed = family == "gpt2";
        let first = format!("{}.weight", before[0]);
        let (rows, ordered) = (parts(&stored, &first, is_transposed), parts(&auto, &first, is_transposed));
        let place = |row: &Vec<f32>| rows.iter().position(|other| other == row).unwrap();
        let order: Vec<usize> = ordered.iter().map(place).collect();
        assert!(!order.is_sorted(), "{family}");
        for tensor in stored.tensors().filter(|tensor| tensor.name != down) {
            let name = tensor.name.as_str();
            let by_columns = is_transposed && tensor.shape.len() == 2;
            let (rows, found) = (parts(&stored, name, by_columns), parts(&auto, name, by_columns));
            assert_eq!(parts(&off, name, by_columns), rows, "{family}: {name}");
            let is_before = before.iter().any(|before| name.starts_with(&format!("{before}.")));
            let expected = if is_before { order.iter().map(|from| rows[*from].clone()).collect() } else { rows };
            assert_eq!(found, expected, "{family}: {name}");
        }
        let columns = parts(&stored, &down, !is_transposed);
        for (from, found) in order.iter().zip(parts(&auto, &down, !is_transposed)) {
            let is_kept = |(found, stored): (&f32, &f32)| *found == 0.0 || found == stored;
            assert!(found.iter().zip(&columns[*from]).all(is_kept), "{family}: {from}");
        }
    }
}

#[test]
fn tables_have_a_row_for_a_kind_of_layer() {
    let dir = tempfile::tempdir().unwrap();
    let model = checkpoint("llama");
    let pruned = run(dir.path(), &["prune", &model, "-o", "out"]).good().stdout;
    assert!(pruned.contains("model.layers.*.self_attn.q_proj.weight (2)"), "{pruned}");
    let checked = run(dir.path(), &["check", "out"]).good().stdout;
    assert!(checked.contains("model.layers.*.mlp.down_proj.weight (2)"), "{checked}");
    let detailed = run(dir.path(), &["check", "out", "-v"]).stdout;
    assert!(detailed.contains("model.layers.1.mlp.down_proj.weight") && !detailed.contains('*'), "{detailed}");
    let detailed = run(dir.path(), &["prune", &model, "-o", "more", "-v"]).stdout;
    assert!(detailed.contains("model.layers.1.mlp.down_proj.weight") && !detailed.contains("(2)"), "{detailed}");
}

#[test]
fn what_calibration_requires_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(4000)).unwrap();
    fs::write(at.join("short.txt"), "abc").unwrap();
    let model = checkpoint("llama");
    let prune = |more: &[&str]| {
        [&["prune", model.as_str(), "-o", "out"], more].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let bad = |code: i32, more: &[&str]| {
        let arguments = prune(more);
        let message = run(at, &arguments.iter().map(String::as_str).collect::<Vec<_>>()).bad(code);
        assert_eq!(names(at), ["short.txt", "text.txt"], "{message}");
        message
    };
    for method in ["wanda", "ria", "sparsegpt", "alps"] {
        assert!(bad(2, &["--method", method]).contains("--calibration"));
    }
    for follows in ["--refit", "--swaps", "--compensate"] {
        assert!(bad(2, &[follows, "1"]).contains("--calibration"));
    }
    assert!(bad(2, &["--permute", "off"]).contains("--calibration"));
    let with = |text| ["--method", "wanda", "--calibration", text];
    let magnitude = ["--method", "magnitude", "--calibration", "text.txt", "--refit", "off", "--compensate", "off"];
    assert!(bad(2, &magnitude).contains("no effect"));
    assert!(bad(2, &[&with("text.txt")[..], &["--refit", "some"]].concat()).contains("off"));
    for share in ["1.5", "-0.1", "half"] {
        let compensate = format!("--compensate={share}");
        assert!(bad(2, &[&with("text.txt")[..], &[&compensate]].concat()).contains("from 0 to 1"));
    }
    assert!(bad(2, &["--samples", "4"]).contains("--calibration"));
    assert!(bad(2, &[&with("text.txt")[..], &["--axis", "column"]].concat()).contains("reduction axis"));
    assert!(bad(2, &[&with("text.txt")[..], &["--length", "41"]].concat()).contains("40"));
    assert!(bad(2, &with("short.txt")).contains("short.txt"));
    assert!(bad(1, &with("missing.txt")).contains("missing.txt"));
    bad(2, &[&with("text.txt")[..], &["--samples", "0"]].concat());
    // What is at the output is looked at before anything is read, let alone computed.
    fs::create_dir(at.join("out")).unwrap();
    fs::write(at.join("out/notes"), "mine").unwrap();
    let arguments = prune(&with("missing.txt"));
    let message = run(at, &arguments.iter().map(String::as_str).collect::<Vec<_>>()).bad(1);
    assert!(message.contains("already exists"), "{message}");
}

/// Encoded whole, it would take minutes and gigabytes.
#[test]
fn of_a_long_text_only_pieces_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let text = letters(4000);
    fs::write(at.join("long.txt"), text.repeat((96 << 20) / text.len())).unwrap();
    for family in ["llama", "bert"] {
        let model = checkpoint(family);
        let prune = |out: &str, seed: &str| {
            let calibration =
                ["--calibration", "long.txt", "--samples", "6", "--length", "24", "--seed", seed, "--json"];
            let arguments = ["prune", &model, "-o", out, "--force", "--method", "wanda"];
            let answer = run(at, &[&arguments[..], &calibration].concat()).good().json();
            assert_eq!(answer["calibration_tokens"], 6 * 24);
            answer["tensors"].clone()
        };
        let first = prune("out", "1");
        assert_eq!(first, prune("out", "1"), "{family}");
        assert_ne!(first, prune("out", "2"), "{family}");
        fs::remove_dir_all(at.join("out")).unwrap();
    }
    // What is no text ends at once.
    let model = checkpoint("llama");
    for (calibration, word) in [("/dev/zero", "a device"), (".", "a directory")] {
        let arguments = ["prune", &model, "-o", "out", "--method", "wanda", "--calibration", calibration];
        assert!(run(at, &arguments).bad(1).contains(word));
        assert!(run(at, &["eval", &model, "--text", calibration]).bad(1).contains(word));
    }
}

/// An activation that is not finite has its cause in the weights, and these are named.
#[test]
fn a_weight_that_is_not_finite_is_named_by_calibrated_methods() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(4000)).unwrap();
    copy(checkpoint("mistral"), at.join("nan"));
    let path = at.join("nan/model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: serde_json::Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let weight = &tensors["model.layers.0.self_attn.v_proj.weight"];
    assert_eq!(weight["dtype"], "F16", "{weight}");
    let [begin, cols] = [&weight["data_offsets"][0], &weight["shape"][1]].map(|v| v.as_u64().unwrap() as usize);
    let index = header + begin + 2 * (2 * cols + 3);
    bytes[index..index + 2].copy_from_slice(&[0, 0x7E]);
    fs::write(&path, bytes).unwrap();
    for method in ["wanda", "sparsegpt"] {
        let arguments =
            ["prune", "nan", "-o", "out", "--method", method, "--calibration", "text.txt", "--length", "24"];
        let message = run(at, &arguments).bad(1);
        assert!(message.contains("`model.layers.0.self_attn.v_proj.weight`: row 2, column 3"), "{message}");
        assert_eq!(names(at), ["nan", "text.txt"]);
    }
}

#[test]
fn what_a_method_keeps_is_rounded_in_the_same_pass() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(4000)).unwrap();
    let model = checkpoint("llama");
    let calibration = ["--calibration", "text.txt", "--samples", "12", "--length", "24", "--compensate", "0.5"];
    let calibration = [&calibration[..], &["--tune", "0"]].concat();
    let prune = |out: &str, more: &[&str]| {
        let arguments = ["prune", &model, "-o", out, "--method", "sparsegpt", "--json"];
        run(at, &[&arguments[..], &calibration, more].concat())
    };
    let error = |answer: &serde_json::Value| {
        let errors: Vec<f64> =
            answer["tensors"].as_array().unwrap().iter().filter_map(|t| t["relative_error"].as_f64()).collect();
        assert_eq!(errors.len(), 14);
        errors.iter().sum::<f64>()
    };
    let floats = prune("floats", &[]).good().json();
    for (integers, dtype, group) in [("int8", "I8", None), ("int4", "I4", Some(128)), ("int4", "I4", None)] {
        let out = format!("{integers}-{group:?}");
        let more: &[&str] = if integers == "int4" && group.is_none() { &["--group", "row"] } else { &[] };
        let answer = prune(&out, &[&["--quantize", integers], more].concat()).good().json();
        assert_eq!(answer["quantization"]["dtype"], dtype);
        assert_eq!(answer["quantization"]["group"].as_u64(), group);
        // Rounding adds to the error of pruning, less where integers are wider.
        let ratio = error(&answer) / error(&floats);
        assert!(ratio > 0.9 && ratio < if integers == "int8" { 1.1 } else { 2.0 }, "{integers}: {ratio}");
        let weights = |name: &String| name.contains("safetensors");
        let mut expected: Vec<String> = names(model.as_ref());
        expected.iter_mut().filter(|name| weights(name)).for_each(|name| name.insert_str(0, "twofour-"));
        expected.push("README-twofour.md".to_owned());
        expected.sort();
        assert_eq!(names(&at.join(&out)), expected);
        run(at, &["check", &out]).good();
        let inspected = run(at, &["inspect", &out, "--json"]).good().stdout;
        assert!(inspected.contains(dtype), "{inspected}");
        let eval = |model: &str| {
            let arguments = ["eval", model, "--text", "text.txt", "--window", "24", "--json"];
            run(at, &arguments).good().json()["perplexity"].as_f64().unwrap()
        };
        let ratio = eval(&out) / eval("floats");
        assert!((ratio - 1.0).abs() < if integers == "int8" { 0.05 } else { 0.5 }, "{integers}: {ratio}");
        let text = run(at, &["generate", &out, "--prompt", "two", "--length", "5", "--json"]).good().json();
        assert!(text["token_ids"].as_array().unwrap().len() <= 5);
        // The zeros of the integers are those of the decompressed weights.
        run(at, &["decompress", &out, "-o", &format!("{out}-dense")]).good();
        run(at, &["check", &format!("{out}-dense")]).good();
    }
    let refused = |arguments: &[&str]| run(at, &[&["prune", &model, "-o", "no"], arguments].concat()).bad(2);
    assert!(refused(&["--quantize", "int8"]).contains("--calibration"));
    // What is 2:4 already keeps its mask, and loses less than by rounding each weight for itself.
    let again = ["prune", "floats", "-o", "again", "--method", "magnitude", "--permute", "off", "--quantize", "int4"];
    run(at, &[&again[..], &calibration].concat()).good();
    run(at, &["quantize", "floats", "-o", "nearest", "--dtype", "int4"]).good();
    // Rounding alone is enough for a text to have an effect.
    let alone = ["prune", "floats", "-o", "alone", "--method", "magnitude", "--refit", "off"];
    let alone = [&alone[..], &calibration[..6]].concat();
    run(at, &[&alone[..], &["--quantize", "int4"]].concat()).good();
    assert!(run(at, &alone).bad(2).contains("--quantize"));
    let [floats, again, nearest] = ["floats", "again", "nearest"].map(|model| {
        run(at, &["eval", model, "--text", "text.txt", "--window", "24", "--json"]).good().json()["perplexity"]
            .as_f64()
            .unwrap()
    });
    assert!((again / floats - 1.0).abs() < (nearest / floats - 1.0).abs(), "{floats} {again} {nearest}");
    assert!(refused(&["--group", "64"]).contains("--quantize"));
    let four_of_eight = ["--method", "sparsegpt", "--quantize", "int4", "--pattern", "4:8"];
    assert!(refused(&[&four_of_eight[..], &calibration].concat()).contains("2:4, not 4:8"));
    let gpt2 = checkpoint("gpt2");
    let across = ["prune", &gpt2, "-o", "no", "--method", "sparsegpt", "--quantize", "int8"];
    assert!(run(at, &[&across[..], &calibration].concat()).bad(1).contains("leave out --quantize"));
    assert!(!names(at).contains(&"no".to_owned()));
}

#[test]
fn perplexity_before_and_after_is_that_of_eval() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(4000)).unwrap();
    let model = checkpoint("llama");
    let windows = ["--window", "20", "--stride", "10"];
    let arguments = ["prune", &model, "-o", "out", "--eval", "text.txt"];
    let answer = run(at, &[&arguments[..], &windows, &["--json"]].concat()).good().json();
    for (name, path) in [("before", model.as_str()), ("after", "out")] {
        let eval = ["eval", path, "--text", "text.txt", "--json"];
        let found = run(at, &[&eval[..], &windows].concat()).good().json();
        assert_eq!(found["perplexity"], answer["perplexity"][name], "{name}");
        assert_eq!(found["tokens"], answer["perplexity"]["tokens"]);
    }
    assert_ne!(answer["perplexity"]["before"], answer["perplexity"]["after"]);
    let people = run(at, &[&arguments[..], &["--force"]].concat()).good().stdout;
    assert!(people.contains("perplexity") && people.contains(" before, "), "{people}");
    // Nothing is pruned where the model cannot be measured.
    let bad = |more: &[&str], code| run(at, &[&["prune", &model, "-o", "no"], more].concat()).bad(code);
    assert!(bad(&["--eval", "absent.txt"], 1).contains("absent.txt"));
    assert!(bad(&["--eval", "text.txt", "--window", "41"], 2).contains("window"));
    let file = ["prune", &checkpoint("mistral"), "-o", "no.safetensors", "--eval", "text.txt"];
    assert!(run(at, &file).bad(2).contains("name a directory"));
    assert!(!names(at).contains(&"no.safetensors".to_owned()));
    assert!(bad(&["--window", "8"], 2).contains("--eval"));
    assert!(!names(at).contains(&"no".to_owned()));
}

#[test]
fn tuned_blocks_are_nearer_to_the_dense_model_under_the_same_masks() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(4000)).unwrap();
    let calibration = ["--calibration", "text.txt", "--samples", "12", "--length", "24"];
    for (family, method) in [("llama", "alps"), ("qwen2", "wanda"), ("gemma3", "sparsegpt"), ("gpt2", "wanda")] {
        let model = checkpoint(family);
        let of = |out: &str, more: &[&str]| {
            let settings = ["prune", &model, "-o", out, "--json", "--method", method];
            run(at, &[&settings[..], &calibration, more].concat()).good().json()
        };
        let [alone, tuned, relative] = [
            ("alone", &["--tune", "0"][..]),
            ("tuned", &["--tune", "12", "--tune-rate", "1e-3"]),
            ("relative", &["--tune", "12", "--tune-rate", "1e-3", "--tune-error", "relative"]),
        ]
        .map(|(out, more)| of(&format!("{family}-{out}"), more));
        assert!(alone["tuning"].is_null() && tuned["tuning"]["passes"] == 12, "{family}");
        for answer in [&tuned, &relative] {
            let errors = answer["tuning"]["errors"].as_array().unwrap();
            assert!(errors.len() >= 2, "{family}: {errors:?}");
            let falls = |error: &Value| error[1].as_f64().unwrap() < error[0].as_f64().unwrap();
            assert!(errors.iter().all(falls), "{family}: {errors:?}");
        }
        if family != "gpt2" {
            let integers = ["--quantize", "int4", "--tune", "12", "--tune-rate", "2e-3"];
            let answer = of(&format!("{family}-int4"), &integers);
            let errors = answer["tuning"]["errors"].as_array().unwrap();
            let falls = |error: &Value| error[1].as_f64().unwrap() < error[0].as_f64().unwrap();
            assert!(errors.iter().all(falls), "{family}: {errors:?}");
            run(at, &["check", &format!("{family}-int4")]).good();
            let reader = Reader::open(at.join(format!("{family}-int4"))).unwrap();
            assert!(
                reader.compressed_weights().any(|weight| matches!(weight.format, ValueFormat::Int4(_))),
                "{family}"
            );
        }
        let read = |out: &str| Reader::open(at.join(out)).unwrap();
        let [before, after] = ["alone", "tuned"].map(|out| read(&format!("{family}-{out}")));
        let mut changed = 0;
        for tensor in before.plain_tensors() {
            let [a, b] = [&before, &after].map(|reader| parts(reader, &tensor.name, false).concat());
            let is_zero = |values: &[f32]| values.iter().map(|value| *value == 0.0).collect::<Vec<_>>();
            // Later masks depend on what earlier blocks compute.
            if tensor.name.contains(".0.") {
                assert!(is_zero(&a) == is_zero(&b), "{family}: {}", tensor.name);
            }
            changed += usize::from(a != b);
        }
        let pruned = tuned["tensors"].as_array().unwrap().iter().filter(|tensor| tensor["pruned"] == true).count();
        assert!(changed >= pruned, "{family}: {changed} of {pruned}");
    }
}

#[test]
fn what_tuning_cannot_do_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(4000)).unwrap();
    let bad = |family: &str, more: &[&str]| {
        let model = checkpoint(family);
        run(at, &[&["prune", &model, "-o", "out"], more].concat()).bad(2)
    };
    let calibration = ["--calibration", "text.txt"];
    for (more, words) in [
        (&["--tune", "2"][..], "--calibration"),
        (&["--tune-samples", "8"], "--calibration"),
        (&["--tune-rate", "1e-4"], "--calibration"),
        (&["--calibration", "text.txt", "--tune-samples", "0"], "0 is not in 1.."),
        (&["--device", "cuda"], "--calibration"),
        (&["--calibration", "text.txt", "--device", "cuda:0,1"], "one GPU"),
        (&["--calibration", "text.txt", "--tune", "2", "--tune-rate", "0"], "a finite number above 0"),
        (&["--calibration", "text.txt", "--tune", "2", "--tune-rate", "inf"], "a finite number above 0"),
        (&["--calibration", "text.txt", "--tune", "2", "--tune-error", "cosine"], "squared"),
        (&["--calibration", "text.txt", "--tune", "2", "--device", "cuda:0,1"], "one GPU"),
    ] {
        let message = bad("llama", more);
        assert!(message.contains(words), "{words}: {message}");
    }
    let model = checkpoint("bert");
    let message = run(at, &[&["prune", &model, "-o", "out", "--tune", "2"], &calibration[..]].concat()).bad(1);
    assert!(message.contains("decoders") && message.contains("bert"), "{message}");
    assert_eq!(names(at), ["text.txt"]);
}

/// The error of the pruned layers, in the mean.
fn mean_error(answer: &Value) -> f64 {
    let errors: Vec<f64> =
        answer["tensors"].as_array().unwrap().iter().filter_map(|t| t["relative_error"].as_f64()).collect();
    errors.iter().sum::<f64>() / errors.len() as f64
}

#[test]
fn a_low_rank_part_lies_beside_pruned_weights_as_an_adapter() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(4000)).unwrap();
    let calibration = ["--calibration", "text.txt", "--samples", "8", "--length", "24", "--compensate", "0.5"];
    for (family, is_transposed) in [("llama", false), ("gpt2", true), ("bert", false)] {
        let model = checkpoint(family);
        let prune = |out: &str, more: &[&str]| {
            run(at, &[&["prune", &model, "-o", out, "--json"], &calibration[..], more].concat()).good().json()
        };
        let alone = prune("alone", &[]);
        let mut before = f64::INFINITY;
        for rank in ["1", "4", "60%"] {
            let answer = prune("beside", &["--low-rank", "eora", "--rank", rank, "--force"]);
            let error = mean_error(&answer);
            assert!(error < mean_error(&alone) && error < before, "{family} {rank}: {error}, before {before}");
            before = error;
            let own = &answer["low_rank"];
            let adapter = Reader::open(at.join("beside/low-rank/adapter_model.safetensors")).unwrap();
            assert_eq!(own["bytes"], adapter.tensors().map(|tensor| tensor.bytes).sum::<usize>());
            let pruned = answer["tensors"].as_array().unwrap().iter().filter(|t| t["pruned"] == true).count();
            assert_eq!((&own["weights"], adapter.tensors().count()), (&pruned.into(), 2 * pruned));
            let config = support::read_json(at.join("beside/low-rank/adapter_config.json"));
            assert_eq!((&config["r"], &config["fan_in_fan_out"]), (&own["ranks"][1], &is_transposed.into()));
            assert_eq!(config["lora_alpha"], config["r"]);
            assert_eq!(config["target_modules"].as_array().unwrap().len(), pruned);
        }
        // The weights are 2:4 without it, and the files of the model are what they were.
        run(at, &["check", "beside", "--axis", if is_transposed { "column" } else { "row" }]).good();
        let listed: Vec<String> = names(&at.join("beside")).into_iter().filter(|name| name != "low-rank").collect();
        assert_eq!(listed, names(model.as_ref()));
        for refit in ["off", "10"] {
            let slim = prune("slim", &["--low-rank", "slim", "--rank", "4", "--refit", refit, "--force"]);
            assert!(mean_error(&slim) < mean_error(&alone), "{family} {refit}");
        }
        for out in ["alone", "beside", "slim"] {
            fs::remove_dir_all(at.join(out)).unwrap();
        }
    }
    // Integers leave it as it is, and perplexity is that of both together.
    let model = checkpoint("llama");
    let eval = ["--eval", "text.txt", "--window", "24", "--json"];
    let low_rank = ["--low-rank", "eora", "--rank", "6"];
    let prune = |out: &str, more: &[&str]| {
        let arguments = [&["prune", &model, "-o", out], &calibration[..], &eval, more].concat();
        run(at, &arguments).good().json()["perplexity"].clone()
    };
    let alone = prune("alone", &[]);
    let beside = prune("beside", &low_rank);
    let distance = |answer: &Value| (answer["after"].as_f64().unwrap() - answer["before"].as_f64().unwrap()).abs();
    assert!(distance(&beside) < distance(&alone), "{alone} {beside}");
    prune("int8", &[&low_rank[..], &["--quantize", "int8"]].concat());
    assert!(at.join("int8/low-rank/adapter_model.safetensors").exists());
    // What stays in a folder must be true of the model in it.
    let again = ["prune", &model, "-o", "beside", "--force"];
    assert!(run(at, &again).bad(2).contains("low-rank part of the model that is there"));
    let bad = |more: &[&str]| run(at, &[&["prune", &model, "-o", "out"], more].concat()).bad(2);
    assert!(bad(&["--low-rank", "eora"]).contains("--calibration"));
    assert!(bad(&[&calibration[..], &["--rank", "4"]].concat()).contains("--low-rank"));
    assert!(bad(&[&calibration[..], &["--low-rank", "eora", "--rank", "0"]].concat()).contains("from 1"));
    assert!(bad(&[&calibration[..], &["--low-rank", "eora", "--tune", "1"]].concat()).contains("cannot be used"));
    assert!(bad(&[&calibration[..], &["--low-rank", "slim", "--quantize", "int8"]].concat()).contains("eora"));
    let experts = checkpoint("mixtral");
    let experts = ["prune", &experts, "-o", "out", "--low-rank", "eora", "--calibration", "text.txt"];
    assert!(run(at, &experts).bad(2).contains("*expert*"));
    let images = checkpoint("llava");
    let images = ["prune", &images, "-o", "out", "--low-rank", "eora", "--calibration", "text.txt"];
    assert!(run(at, &images).bad(2).contains("text and images"));
    let file = ["prune", &model, "-o", "out.safetensors", "--low-rank", "eora"];
    assert!(run(at, &[&file[..], &calibration].concat()).bad(2).contains("name a directory"));
}
