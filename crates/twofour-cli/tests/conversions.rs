//! `prune`, `check`, `compress`, `decompress` and `inspect` on good input.

use std::{fs, process::Stdio};

use crate::support::{model, names, random, run, twofour, write};

#[test]
fn a_model_goes_through_all_of_it_and_every_bit_comes_back() {
    let (dir, _) = model();
    let at = dir.path();
    let pruned = run(at, &["prune", "model.safetensors", "-o", "pruned.safetensors"]).good();
    for part in
        ["layers.0.up.weight", "50.0 %", "kept: embedding", "kept: norm", "kept: output head", "2 of 6 tensors pruned"]
    {
        assert!(pruned.stdout.contains(part), "{part}: {}", pruned.stdout);
    }
    assert!(!pruned.stdout.contains('\x1b'), "colours where no terminal is");
    assert_eq!(run(at, &["check", "model.safetensors"]).code, Some(1));
    run(at, &["check", "pruned.safetensors"]).good();
    run(at, &["compress", "pruned.safetensors", "-o", "small.safetensors"]).good();
    run(at, &["check", "small.safetensors"]).good();
    run(at, &["decompress", "small.safetensors", "-o", "back.safetensors"]).good();
    let read = |name: &str| fs::read(at.join(name)).unwrap();
    assert!(read("small.safetensors").len() < read("pruned.safetensors").len());
    // The writer orders tensors in its own way, once; so both went through it and must be the same bytes.
    assert_eq!(read("pruned.safetensors"), read("back.safetensors"));
    let answer = run(at, &["inspect", "--json", "small.safetensors"]).good().json();
    let compressed: Vec<&str> = answer["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|t| t["compressed"] == true)
        .map(|t| t["name"].as_str().unwrap())
        .collect();
    assert_eq!(compressed, ["layers.0.down.weight", "layers.0.up.weight"]);
    assert_eq!(names(at).len(), 4, "{:?}", names(at));
}

#[test]
fn pruning_keeps_the_largest_two_of_four() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("in.safetensors"), &[("weight", (vec![1, 8], vec![1., -4., 3., 2., 0., 0., 5., 0.]))]);
    let ran = run(dir.path(), &["prune", "in.safetensors", "-o", "out.safetensors", "--json"]).good();
    let bytes = fs::read(dir.path().join("out.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let values: Vec<f32> =
        file.tensor("weight").unwrap().data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(values, [0., -4., 3., 0., 0., 0., 5., 0.]);
    let t = &ran.json()["tensors"][0];
    assert_eq!(t["density_before"], 5.0 / 8.0);
    assert_eq!(t["kept_l1"], 12.0 / 15.0);
    assert_eq!(t["mask_density"], 0.5);
}

#[test]
fn other_patterns_axes_and_tiles_are_found_again() {
    let (dir, _) = model();
    let at = dir.path();
    for (options, pattern, axis) in [
        (&["--pattern", "4:8"][..], "4:8", "row"),
        (&["--axis", "column"], "2:4", "column"),
        (&["--transposable", "optimal"], "2:4", "both"),
        (&["--transposable", "greedy"], "2:4", "both"),
        (&["--pattern", "1:4"], "1:4", "row"),
    ] {
        run(at, &[&["prune", "model.safetensors", "-o", "out.safetensors", "--force"], options].concat()).good();
        let ran = run(at, &["check", "out.safetensors", "--pattern", pattern, "--axis", axis, "--json"]).good();
        let tensor = &ran.json()["tensors"][0];
        let key = if axis == "column" { "columns" } else { "rows" };
        assert_eq!(tensor[key]["found"], pattern, "{options:?}");
        assert_eq!(tensor["transposable"], axis == "both");
    }
    let message = run(at, &["prune", "model.safetensors", "-o", "x", "--transposable", "greedy", "--pattern", "1:4"]);
    assert!(message.bad(2).contains("--transposable"));
}

#[test]
fn a_violation_is_named_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let mut data = vec![0.0; 32];
    data[20..23].fill(1.0);
    data[0] = -0.0;
    write(&dir.path().join("m.safetensors"), &[("a.weight", (vec![4, 8], data))]);
    let ran = run(dir.path(), &["check", "m.safetensors"]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stdout.contains("row 2, group 1: 3 non-zeros"), "{}", ran.stdout);
    let answer = run(dir.path(), &["check", "m.safetensors", "--json"]).json();
    let t = &answer["tensors"][0];
    assert_eq!(answer["obeys"], false);
    assert_eq!((&t["rows"]["violation_count"], &t["negative_zeros"]), (&1.into(), &1.into()));
    let place = serde_json::json!({"line": 2, "group": 1, "nonzeros": 3, "allowed": 2});
    assert_eq!(t["rows"]["violations"][0], place);
    // Columns hold one non-zero each.
    run(dir.path(), &["check", "m.safetensors", "--axis", "column"]).good();
}

#[test]
fn include_and_exclude_choose() {
    let (dir, _) = model();
    let at = dir.path();
    run(
        at,
        &[
            "prune",
            "model.safetensors",
            "-o",
            "out.safetensors",
            "--include",
            "embed*",
            "--include",
            "layers.*",
            "--exclude",
            "*.up.*",
        ],
    )
    .good();
    let pruned: Vec<String> =
        run(at, &["check", "out.safetensors", "--include", "*.weight", "--json"]).json()["tensors"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|t| t["obeys"] == true)
            .map(|t| t["name"].as_str().unwrap().to_owned())
            .collect();
    assert_eq!(pruned.len(), 2, "{pruned:?}");
    assert!(pruned.contains(&"embed.weight".to_owned()) && pruned.contains(&"layers.0.down.weight".to_owned()));
    let message = run(at, &["prune", "model.safetensors", "-o", "x.safetensors", "--include", "lajers*"]).bad(2);
    assert!(message.contains("lajers*") && message.contains("their names are like"), "{message}");
}

#[test]
fn a_dense_weight_is_not_compressed_unless_asked() {
    let (dir, _) = model();
    let at = dir.path();
    let message = run(at, &["compress", "model.safetensors", "-o", "small.safetensors"]).bad(1);
    assert!(message.contains("layers.0") && message.contains("group 0") && message.contains("non-zeros"), "{message}");
    assert_eq!(names(at), ["model.safetensors"]);
    run(at, &["compress", "model.safetensors", "-o", "small.safetensors", "--prune", "--quiet"]).good();
    run(at, &["check", "small.safetensors"]).good();
    let message = run(at, &["compress", "model.safetensors", "-o", "kept.safetensors", "--keep-dense"]).bad(1);
    assert!(
        message.contains("none of the 2 chosen tensors is 2:4") && message.contains("prune the model first"),
        "{message}"
    );
    assert_eq!(names(at), ["model.safetensors", "small.safetensors"]);
}

#[test]
fn negative_zeros_are_counted_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    write(&dir.path().join("m.safetensors"), &[("a.weight", (vec![1, 4], vec![-0.0, 1.0, 0.0, -0.0]))]);
    let ran = run(dir.path(), &["compress", "m.safetensors", "-o", "s.safetensors"]);
    assert!(ran.code == Some(0) && ran.stderr.contains("2 -0.0 will come back as +0.0"), "{ran:?}");
    let message = run(dir.path(), &["compress", "m.safetensors", "-o", "e.safetensors", "--exact"]).bad(1);
    assert!(message.contains("-0.0"), "{message}");
}

#[test]
fn quiet_says_nothing_and_json_only_json() {
    let (dir, _) = model();
    let at = dir.path();
    let quiet = run(at, &["prune", "model.safetensors", "-o", "p.safetensors", "--quiet"]).good();
    assert_eq!(quiet.stdout, "");
    let json = run(at, &["prune", "model.safetensors", "-o", "p2.safetensors", "--json"]).good().json();
    assert_eq!(json["pattern"], "2:4");
    assert_eq!(json["tensors"].as_array().unwrap().len(), 6);
    for command in ["compress", "check", "inspect"] {
        let output = format!("{command}.safetensors");
        let more = if command == "compress" { vec!["-o", &output] } else { vec![] };
        run(at, &[vec![command, "--json", "p.safetensors"], more].concat()).good().json();
    }
    let loud = run(at, &["inspect", "-vv", "p.safetensors"]);
    assert_eq!(loud.code, Some(0));
}

#[test]
fn a_sharded_model_gives_a_sharded_model() {
    let dir = tempfile::tempdir().unwrap();
    let sharded = dir.path().join("in");
    fs::create_dir(&sharded).unwrap();
    write(&sharded.join("a.safetensors"), &[("l.0.weight", random(&[8, 16]))]);
    write(&sharded.join("b.safetensors"), &[("l.1.weight", random(&[8, 16]))]);
    let index = r#"{"metadata": {"total_size": 1024},
        "weight_map": {"l.0.weight": "a.safetensors", "l.1.weight": "b.safetensors"}}"#;
    fs::write(sharded.join("model.safetensors.index.json"), index).unwrap();
    run(dir.path(), &["prune", "in", "-o", "out"]).good();
    run(dir.path(), &["check", "out"]).good();
    assert_eq!(names(&dir.path().join("out")), ["a.safetensors", "b.safetensors", "model.safetensors.index.json"]);
    fs::remove_file(sharded.join("b.safetensors")).unwrap();
    let message = run(dir.path(), &["check", "in"]).bad(1);
    assert!(message.contains("b.safetensors"), "{message}");
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let (dir, path) = model();
    let mut child = twofour()
        .args(["inspect", path.to_str().unwrap()])
        .current_dir(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

#[test]
fn quantizing_a_directory_keeps_what_is_no_2_to_4_weight() {
    let (dir, path) = model();
    let at = dir.path();
    fs::create_dir(at.join("model")).unwrap();
    fs::write(at.join("model/config.json"), "{}").unwrap();
    fs::rename(path, at.join("model/model.safetensors")).unwrap();
    let message = run(at, &["quantize", "model", "-o", "x", "--dtype", "int4", "--group", "100"]).bad(2);
    assert!(message.contains("use 128, 64 or `row`"), "{message}");
    let message = run(at, &["quantize", "model", "-o", "kept", "--dtype", "int4"]).bad(1);
    assert!(message.contains("none of the 2 chosen tensors is 2:4"), "{message}");
    run(at, &["prune", "model", "-o", "half", "--exclude", "*.down.*"]).good();
    let half = run(at, &["quantize", "half", "-o", "half-int4", "--dtype", "int4"]).good().stdout;
    assert!(half.contains("kept: not 2:4") && half.contains("kept: embedding"), "{half}");
    run(at, &["prune", "model", "-o", "pruned"]).good();
    for (dtype, group, expected) in
        [("int8", "row", "I8"), ("int8", "128", "I8"), ("int4", "128", "I4"), ("int4", "64", "I4")]
    {
        let out = format!("{dtype}-{group}");
        let arguments = ["quantize", "pruned", "-o", &out, "--dtype", dtype, "--group", group, "--json"];
        let answer = run(at, &arguments).good().json();
        assert_eq!((&answer["dtype"], answer["group"].as_u64()), (&expected.into(), group.parse().ok()));
        assert!(answer["bytes_after"].as_u64() < answer["bytes_before"].as_u64());
        let quantized: Vec<_> =
            answer["tensors"].as_array().unwrap().iter().filter(|t| t["quantized"] == true).collect();
        assert_eq!(quantized.len(), 2);
        let most = if dtype == "int8" { 0.01 } else { 0.15 };
        assert!(
            quantized.iter().all(|t| t["relative_error"].as_f64().is_some_and(|e| e > 0.0 && e < most)),
            "{answer}"
        );
        assert_eq!(names(&at.join(&out)), ["README-twofour.md", "config.json", "twofour-model.safetensors"]);
        run(at, &["check", &out]).good();
        let inspected = run(at, &["inspect", "--json", &out]).good().json();
        let sizes: Vec<_> =
            inspected["tensors"].as_array().unwrap().iter().filter_map(|t| t["group_size"].as_u64()).collect();
        assert_eq!(sizes, vec![group.parse::<u64>().unwrap_or(0); if group == "row" { 0 } else { 2 }]);
        run(at, &["decompress", &out, "-o", &format!("{out}-dense")]).good();
        let message = run(at, &["compress", &out, "-o", &format!("{out}-copy")]).bad(1);
        assert!(message.contains("2 weights are compressed already"), "{message}");
        let message = run(at, &["quantize", &out, "-o", &format!("{out}-copy"), "--dtype", "int8"]).bad(1);
        assert!(message.contains("integers already"), "{message}");
        let message = run(at, &["prune", &out, "-o", &format!("{out}-copy"), "--include", "*.up.*"]).bad(1);
        assert!(message.contains("2 are compressed already"), "{message}");
        let message = run(at, &["decompress", "pruned", "-o", &format!("{out}-copy")]).bad(1);
        assert!(message.contains("no weight is compressed"), "{message}");
        assert!(!at.join(format!("{out}-copy")).exists());
    }
    // From compressed weights the same bytes.
    run(at, &["compress", "pruned", "-o", "small"]).good();
    run(at, &["quantize", "small", "-o", "int4-small", "--dtype", "int4"]).good();
    let read = |name: &str| fs::read(at.join(name).join("twofour-model.safetensors")).unwrap();
    assert_eq!(read("int4-small"), read("int4-128"));
    let least = run(at, &["quantize", "small", "-o", "least", "--dtype", "int4", "--scale", "least-squares", "--json"]);
    assert!(least.good().json()["tensors"].as_array().unwrap().iter().any(|t| t["relative_error"].is_f64()));
}

#[test]
fn weights_of_four_bits_are_read_by_every_command() {
    use twofour::{
        Compressed, MatrixRef,
        file::{CompressedInfo, Overwrite, Plan, Reader, Writer},
        int4::{Granularity, Int4},
    };
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let dense = random(&[6, 132]).1;
    let weight = Compressed::from_pruned(MatrixRef::new(6, 132, &dense).unwrap()).unwrap();
    let weight = Int4::quantize(&weight, Granularity::Group).unwrap();
    let mut plan = Plan::new();
    plan.compressed(CompressedInfo::int4("up.weight", Granularity::Group, 6, 132).unwrap());
    let mut writer = Writer::create(at.join("int4.safetensors"), Overwrite::No, plan, Default::default()).unwrap();
    writer.write_int4("up.weight", &weight).unwrap();
    writer.finish().unwrap();

    let answer = run(at, &["inspect", "--json", "int4.safetensors"]).good().json();
    let tensor = &answer["tensors"][0];
    assert_eq!((&tensor["dtype"], &tensor["dense_bytes"]), (&"I4".into(), &(4 * 6 * 132).into()));
    assert!(run(at, &["check", "int4.safetensors"]).good().stdout.contains("I4"));
    run(at, &["decompress", "int4.safetensors", "-o", "dense.safetensors"]).good();
    let reader = Reader::open(at.join("dense.safetensors")).unwrap();
    let found = reader.tensor("up.weight").unwrap().to_vec::<f32>().unwrap();
    assert_eq!(found, weight.dequantize().to_dense());
}

/// A model of llama.cpp; `crates/twofour/tests/fixtures/gguf_models.py` made it.
fn gguf(at: &std::path::Path) {
    let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../twofour/tests/fixtures/gguf/qwen2.gguf");
    fs::copy(fixture, at.join("m.gguf")).unwrap();
    fs::write(at.join("text.txt"), "The old man's hats, they'll fall. ".repeat(20)).unwrap();
}

#[test]
fn a_gguf_file_is_converted_and_every_command_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    gguf(at);
    let converted = run(at, &["convert", "m.gguf", "-o", "model", "--json"]).good().json();
    assert_eq!(converted["tensors"].as_array().unwrap().len(), 14);
    assert!(converted["bytes_after"].as_u64() > Some(0), "{converted}");
    assert_eq!(
        names(&at.join("model")),
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    );
    for command in [
        &["eval", "MODEL", "--text", "text.txt", "--window", "32", "--json"][..],
        &["generate", "MODEL", "--prompt", "The old", "--length", "8", "--temperature", "0"],
        &["check", "MODEL", "--json"],
        &["inspect", "MODEL", "--json"],
    ] {
        let answer = |model: &str| {
            let arguments: Vec<&str> = command.iter().map(|part| if *part == "MODEL" { model } else { part }).collect();
            run(at, &arguments)
        };
        let (file, directory) = (answer("m.gguf"), answer("model"));
        assert_eq!(file.code, directory.code, "{command:?}: {}", file.stderr);
        match command[0] {
            "eval" => assert_eq!(file.json()["perplexity"], directory.json()["perplexity"]),
            "generate" => assert_eq!(file.stdout, directory.stdout),
            _ => {}
        }
    }
    for (out, arguments) in [
        ("pruned", &["prune"][..]),
        ("wanda", &["prune", "--method", "wanda", "--calibration", "text.txt", "--samples", "2", "--length", "16"]),
    ] {
        let convert = |input: &str, out: &str| {
            let arguments = [arguments, &[input, "-o", out]].concat();
            run(at, &arguments).good();
            fs::read(at.join(out).join("model.safetensors")).unwrap()
        };
        assert_eq!(convert("m.gguf", out), convert("model", &format!("{out}-again")), "{out}");
        run(at, &["check", out]).good();
        run(at, &["compress", out, "-o", &format!("{out}-small")]).good();
        run(at, &["generate", &format!("{out}-small"), "--prompt", "The", "--length", "2"]).good();
    }
}

#[test]
fn what_cannot_be_converted_is_named_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    gguf(at);
    let bytes = fs::read(at.join("m.gguf")).unwrap();
    let damaged = |from: &str, to: &str| {
        let at_byte = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let mut damaged = bytes.clone();
        damaged[at_byte..at_byte + to.len()].copy_from_slice(to.as_bytes());
        fs::write(at.join("damaged.gguf"), damaged).unwrap();
        run(at, &["convert", "damaged.gguf", "-o", "out"]).bad(1)
    };
    for (from, to, expected) in [
        ("general.architecture", "general.architectura", "`general.architecture` is missing"),
        ("qwen2", "qwen9", "a model of \"qwen9\" is not supported; supported are llama"),
        ("blk.0.attn_q.weight", "blk.0.attn_x.weight", "tensor `blk.0.attn_x.weight`"),
        ("tokenizer.ggml.merges", "tokenizer.ggml.mergez", "`tokenizer.ggml.merges` is missing"),
        ("qwen2.block_count", "qwen2.block_kount", "`qwen2.block_count` is missing"),
    ] {
        let message = damaged(from, to);
        assert!(message.contains("damaged.gguf") && message.contains(expected), "{expected}: {message}");
        assert!(!at.join("out").exists());
    }
    fs::write(at.join("cut.gguf"), &bytes[..bytes.len() - 100]).unwrap();
    assert!(run(at, &["convert", "cut.gguf", "-o", "out"]).bad(1).contains("truncated or damaged"));
    let message = run(at, &["convert", "model.safetensors", "-o", "out"]).bad(1);
    assert!(message.contains("model.safetensors"), "{message}");
    run(at, &["convert", "m.gguf", "-o", "model"]).good();
    let message = run(at, &["convert", "model", "-o", "again"]).bad(1);
    assert!(message.contains("is in safetensors already"), "{message}");
}

/// A model in a format of compressed-tensors; `crates/twofour/tests/fixtures/compressed_tensors_models.py` made it.
fn compressed_tensors(at: &std::path::Path, name: &str) {
    let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../twofour/tests/fixtures/compressed_tensors")
        .join(name);
    fs::create_dir(at.join(name)).unwrap();
    for file in ["config.json", "model.safetensors"] {
        fs::copy(fixture.join(file), at.join(name).join(file)).unwrap();
    }
}

#[test]
fn a_model_goes_from_another_tool_s_format_to_every_other_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    for (name, formats) in [
        ("bitmask-bf16", &["sparse-24-bitmask"][..]),
        ("fp8-bitmask", &["sparse-24-bitmask"]),
        ("marlin-int4-group", &["pack-quantized", "marlin-24"]),
        ("pack-int8-group", &["pack-quantized"]),
    ] {
        compressed_tensors(at, name);
        let ours = format!("{name}-ours");
        let answer = run(at, &["convert", name, "-o", &ours, "--to", "twofour", "--json"]).good().json();
        assert_eq!(answer["read"].as_object().unwrap().len(), 1, "{answer}");
        run(at, &["check", &ours]).good();
        run(at, &["convert", name, "-o", "dense-first"]).good();
        run(at, &["convert", &ours, "-o", "dense-second"]).good();
        let dense = |folder: &str| fs::read(at.join(folder).join("model.safetensors")).unwrap();
        assert_eq!(dense("dense-first"), dense("dense-second"), "{name}");
        for format in formats {
            let written = format!("{name}-{format}");
            run(at, &["convert", &ours, "-o", &written, "--to", format]).good();
            run(at, &["convert", &written, "-o", "back"]).good();
            assert_eq!(dense("back"), dense("dense-first"), "{name} by {format}");
            fs::remove_dir_all(at.join("back")).unwrap();
        }
        fs::remove_dir_all(at.join("dense-first")).unwrap();
        fs::remove_dir_all(at.join("dense-second")).unwrap();
    }
    // A 2:4 model of floats needs no step between.
    run(at, &["convert", "bitmask-bf16", "-o", "dense"]).good();
    run(at, &["convert", "dense", "-o", "again", "--to", "sparse-24-bitmask"]).good();
    let weights = |folder: &str| fs::read(at.join(folder).join("model.safetensors")).unwrap();
    run(at, &["convert", "again", "-o", "dense-again"]).good();
    assert_eq!(weights("dense-again"), weights("dense"));
    let before = names(at);
    for (arguments, expected) in [
        (&["dense", "--to", "pack-quantized"][..], "quantize the model first"),
        (&["marlin-int4-group-ours", "--to", "sparse-24-bitmask"], "has scales"),
        (&["pack-int8-group-ours", "--to", "marlin-24"], "multiple of 128"),
        (&["dense"], "is in safetensors already"),
    ] {
        let message = run(at, &[&["convert", "-o", "no"], arguments].concat()).bad(1);
        assert!(message.contains(expected), "{expected}: {message}");
    }
    let config = r#"{"quantization_config": {"quant_method": "gptq", "bits": 4}}"#;
    fs::write(at.join("dense/config.json"), config).unwrap();
    let message = run(at, &["convert", "dense", "-o", "no", "--to", "twofour"]).bad(1);
    assert!(message.contains("gptq, 4 bits"), "{message}");
    assert_eq!(names(at), before);
}

#[test]
fn masks_of_maskllm_prune_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let fixtures = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../twofour/tests/fixtures/masks");
    for name in ["model.safetensors", "mask_compressed.npz", "masks.pt", "other.npz"] {
        fs::copy(fixtures.join(name), at.join(name)).unwrap();
    }
    let convert = |mask: &str, out: &str| {
        run(at, &["convert", "model.safetensors", "--mask", mask, "-o", out]).good();
        fs::read(at.join(out)).unwrap()
    };
    assert_eq!(convert("mask_compressed.npz", "a.safetensors"), convert("masks.pt", "b.safetensors"));
    run(at, &["check", "a.safetensors", "--include", "*.weight"]).good();
    let arguments = ["convert", "model.safetensors", "--mask", "other.npz", "-o", "c.safetensors"];
    assert!(run(at, &arguments).bad(1).contains("there is no tensor `c.weight`"));
    assert!(!at.join("c.safetensors").exists());
}

#[test]
fn a_model_in_another_tool_s_format_is_evaluated_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    gguf(at);
    let perplexity = |model: &str| {
        let arguments = ["eval", model, "--text", "text.txt", "--window", "32", "--json"];
        run(at, &arguments).good().json()["perplexity"].clone()
    };
    run(at, &["prune", "m.gguf", "-o", "pruned"]).good();
    run(at, &["compress", "pruned", "-o", "small"]).good();
    run(at, &["convert", "pruned", "-o", "bitmask", "--to", "sparse-24-bitmask"]).good();
    assert_eq!(perplexity("bitmask"), perplexity("small"));
    run(at, &["quantize", "pruned", "-o", "int4", "--dtype", "int4", "--group", "row"]).good();
    run(at, &["convert", "int4", "-o", "packed", "--to", "pack-quantized"]).good();
    assert_eq!(perplexity("packed"), perplexity("int4"));
    for command in [&["check", "bitmask"][..], &["prune", "packed", "-o", "no"]] {
        let message = run(at, command).bad(1);
        assert!(message.contains("twofour convert"), "{message}");
    }
}
