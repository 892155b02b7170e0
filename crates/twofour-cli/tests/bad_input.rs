//! Bad input: a clear message, exit code 1 or 2, nothing half-written.

use std::fs;

use crate::support::{self, model, names, random, run, twofour, write};

/// A safetensors file of that header text and so many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(vec![0; data]);
    bytes
}

#[test]
fn hostile_files_are_refused_by_every_command() {
    let tensor = |dtype: &str, shape: &str, from: u64, to: u64| {
        format!(r#"{{"a.weight":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}}}"#)
    };
    let overlap = r#"{"a.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},
        "b.weight":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}"#;
    let dir = tempfile::tempdir().unwrap();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("empty", vec![]),
        ("truncated length", vec![1, 2, 3]),
        ("length lies", [u64::MAX.to_le_bytes().as_slice(), b"{}"].concat()),
        ("length past the end", [1000u64.to_le_bytes().as_slice(), b"{}"].concat()),
        ("no JSON", file("nonsense", 0)),
        ("truncated data", file(&tensor("F32", "[4, 4]", 0, 64), 32)),
        ("out of range", file(&tensor("F32", "[4, 4]", 64, 128), 64)),
        ("backwards", file(&tensor("F32", "[4, 4]", 64, 0), 64)),
        ("wrong dtype", file(&tensor("F31", "[4, 4]", 0, 64), 64)),
        ("absurd shape", file(&tensor("F32", "[4294967296, 4294967296, 4294967296]", 0, 64), 64)),
        ("shape and bytes disagree", file(&tensor("F32", "[4, 5]", 0, 64), 64)),
        ("overlap", file(overlap, 24)),
        ("not safetensors at all", b"PK\x03\x04 this is something else entirely".to_vec()),
    ];
    for (what, bytes) in cases {
        let path = dir.path().join("bad.safetensors");
        fs::write(&path, bytes).unwrap();
        for command in ["check", "inspect", "advise"] {
            let message = run(dir.path(), &[command, "bad.safetensors"]).bad(1);
            assert!(message.contains("bad.safetensors"), "{what}: {message}");
        }
        for command in ["prune", "compress", "decompress"] {
            let message = run(dir.path(), &[command, "bad.safetensors", "-o", "out.safetensors"]).bad(1);
            assert!(message.contains("bad.safetensors"), "{what}: {message}");
        }
        assert_eq!(names(dir.path()), ["bad.safetensors"], "{what}");
    }
}

/// Every command that reads a model, with where to write for those that do.
const READERS: [&[&str]; 7] = [
    &["check"],
    &["inspect"],
    &["advise"],
    &["generate"],
    &["prune", "-o", "out.safetensors"],
    &["compress", "-o", "out.safetensors"],
    &["decompress", "-o", "out.safetensors"],
];

/// Runs each of them on a path that none can read, with nothing written, and gives their messages.
#[track_caller]
fn refusals(at: &std::path::Path, input: &str) -> Vec<String> {
    let before = names(at);
    let messages = READERS.iter().map(|command| run(at, &[*command, &[input]].concat()).bad(1)).collect();
    assert_eq!(names(at), before);
    messages
}

#[test]
fn a_path_that_is_no_model_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for message in refusals(dir.path(), "missing.safetensors") {
        assert!(message.contains("missing.safetensors: "), "{message}");
    }
    fs::create_dir(dir.path().join("empty")).unwrap();
    for message in refusals(dir.path(), "empty") {
        assert!(message.contains("empty: ") && message.contains("no .safetensors file"), "{message}");
    }
    fs::create_dir(dir.path().join("directory.safetensors")).unwrap();
    for message in refusals(dir.path(), "directory.safetensors") {
        assert!(message.contains("directory.safetensors: "), "{message}");
    }
    #[cfg(unix)]
    for message in refusals(dir.path(), "/dev/null") {
        assert!(message.contains("/dev/null: is not a regular file"), "{message}");
    }
}

#[test]
fn a_directory_is_no_place_for_a_single_file() {
    let (dir, _) = model();
    fs::create_dir(dir.path().join("out")).unwrap();
    for command in [&["prune"][..], &["compress", "--prune"], &["decompress"]] {
        for force in [&[][..], &["--force"]] {
            let message = run(dir.path(), &[command, &["model.safetensors", "-o", "out"], force].concat()).bad(1);
            assert!(message.contains("out: is a directory") && message.contains("name the file to write"), "{message}");
        }
    }
    assert_eq!(names(dir.path()), ["model.safetensors", "out"]);
    assert!(names(&dir.path().join("out")).is_empty());
}

#[test]
fn a_sharded_model_without_a_shard_is_refused_by_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let sharded = dir.path().join("in");
    fs::create_dir(&sharded).unwrap();
    write(&sharded.join("a.safetensors"), &[("l.0.weight", random(&[8, 16]))]);
    let index = sharded.join("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map": {"l.0.weight": "a.safetensors", "l.1.weight": "b.safetensors"}}"#).unwrap();
    for input in ["in", "in/model.safetensors.index.json"] {
        for message in refusals(dir.path(), input) {
            assert!(message.contains("model.safetensors.index.json: the index names the shard"), "{message}");
            assert!(message.contains("b.safetensors, which is not there; download or copy it too"), "{message}");
        }
    }
    // Indices that lie.
    for (text, expected) in [
        ("{", "the index"),
        (r#"{"weight_map": {"l.0.weight": "../in/a.safetensors"}}"#, "not a plain file name"),
        (r#"{"weight_map": {"l.0.weight": "a.safetensors", "l.1.weight": "a.safetensors"}}"#, "`l.1.weight`"),
    ] {
        fs::write(&index, text).unwrap();
        for message in refusals(dir.path(), "in") {
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}

#[test]
fn damaged_compressed_weights_are_named() {
    let (dir, _) = model();
    let at = dir.path();
    run(at, &["compress", "--prune", "model.safetensors", "-o", "small.safetensors"]).good();
    let sound = fs::read(at.join("small.safetensors")).unwrap();
    fs::remove_file(at.join("model.safetensors")).unwrap();
    let replaced = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = sound.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        let mut bytes = sound.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    let reads = [&["check"][..], &["decompress", "-o", "out.safetensors"]];
    let refused = |bytes: &[u8], expected: &str| {
        fs::write(at.join("bad.safetensors"), bytes).unwrap();
        for command in reads {
            let ran = run(at, &[command, &["bad.safetensors"]].concat());
            assert_eq!(ran.code, Some(1), "{ran:?}");
            assert!(ran.stderr.contains(expected) && !ran.stderr.contains("panicked"), "{expected}: {ran:?}");
        }
        assert_eq!(names(at), ["bad.safetensors", "small.safetensors"]);
    };
    refused(&replaced(r#"\"version\":1"#, r#"\"version\":7"#), "format version 7 is newer");
    refused(&replaced(r#"\"F32\""#, r#"\"F16\""#), "layers.0");
    refused(&replaced(r#"\"2:4\""#, r#"\"1:4\""#), "1:4");
    refused(&replaced(r#"[24,32]"#, r#"[24,40]"#), "layers.0");
    // Metadata words that hold illegal codes: the values come first, so the codes are in the second half of the data.
    let mut bytes = sound.clone();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = std::str::from_utf8(&sound[8..8 + header]).unwrap();
    let offsets = &text[text.find(r#""layers.0.up.weight.meta""#).unwrap()..];
    let from = offsets.split("\"data_offsets\":[").nth(1).unwrap().split(',').next().unwrap();
    bytes[8 + header + from.parse::<usize>().unwrap()] = 0xFF;
    refused(&bytes, "layers.0.up.weight");
}

#[test]
fn a_model_to_generate_with_is_checked_before_memory_is_taken() {
    let (dir, _) = model();
    assert!(run(dir.path(), &["generate", "model.safetensors"]).bad(1).contains("`twofour.gpt`"));
    let config = |layers: u64, width: u64, heads: u64, context: u64| {
        format!(
            r#"{{\"layers\":{layers},\"width\":{width},\"heads\":{heads},\"context\":{context},\"feed_forward\":8}}"#
        )
    };
    for (text, expected) in [
        ("nonsense".to_owned(), "twofour.gpt"),
        (config(1, 8, 3, 16), "heads"),
        (config(0, 8, 2, 16), "layers"),
        (config(1, 8, u64::MAX, 16), "heads"),
        (config(1 << 20, 8, 2, 16), "1048576 layers"),
        (config(1, 1 << 20, 1, 1 << 20), "context"),
        (config(1, 1 << 20, 1 << 19, 16), "blocks.0"),
    ] {
        let header = format!(
            r#"{{"__metadata__":{{"twofour.gpt":"{text}"}},
                "a.weight":{{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}}}"#
        );
        fs::write(dir.path().join("gpt.safetensors"), file(&header, 16)).unwrap();
        let message = run(dir.path(), &["generate", "gpt.safetensors"]).bad(1);
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn nan_and_infinity_have_a_place_and_nothing_is_written() {
    for (value, word) in [(f32::NAN, "NaN"), (f32::INFINITY, "infinite"), (f32::NEG_INFINITY, "infinite")] {
        let dir = tempfile::tempdir().unwrap();
        let (shape, mut data) = random(&[4, 8]);
        data[19] = value;
        write(&dir.path().join("m.safetensors"), &[("ok.weight", random(&[4, 8])), ("x.weight", (shape, data))]);
        let message = run(dir.path(), &["prune", "m.safetensors", "-o", "out.safetensors"]).bad(1);
        assert!(
            message.contains("x.weight") && message.contains("row 2, column 3") && message.contains(word),
            "{message}"
        );
        assert_eq!(names(dir.path()), ["m.safetensors"]);
        let message = run(dir.path(), &["compress", "--prune", "m.safetensors", "-o", "out.safetensors"]).bad(1);
        assert!(
            message.contains("x.weight") && message.contains("row 2, column 3") && message.contains(word),
            "{message}"
        );
        assert_eq!(names(dir.path()), ["m.safetensors"]);
        let checked = run(dir.path(), &["check", "m.safetensors"]);
        assert_eq!(checked.code, Some(1));
        assert!(checked.stderr.contains("x.weight: "), "{checked:?}");
    }
}

#[test]
fn zero_sized_tensors_are_skipped_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    write(
        &dir.path().join("m.safetensors"),
        &[("a.weight", (vec![0, 4], vec![])), ("b.weight", (vec![4, 0], vec![])), ("c.weight", random(&[4, 4]))],
    );
    let ran = run(dir.path(), &["prune", "m.safetensors", "-o", "p.safetensors"]).good();
    assert_eq!(ran.stdout.matches("kept: no elements").count(), 2, "{}", ran.stdout);
    run(dir.path(), &["compress", "p.safetensors", "-o", "s.safetensors"]).good();
    run(dir.path(), &["decompress", "s.safetensors", "-o", "b.safetensors"]).good();
    run(dir.path(), &["check", "b.safetensors"]).good();
    write(&dir.path().join("empty.safetensors"), &[]);
    assert!(run(dir.path(), &["check", "empty.safetensors"]).bad(1).contains("nothing to check"));
}

#[test]
fn an_existing_output_stays_unless_forced() {
    let (dir, _) = model();
    let at = dir.path();
    fs::write(at.join("out.safetensors"), "precious").unwrap();
    for arguments in [
        ["prune", "model.safetensors", "-o", "out.safetensors"].as_slice(),
        &["compress", "--prune", "model.safetensors", "-o", "out.safetensors"],
        &["decompress", "model.safetensors", "-o", "out.safetensors"],
    ] {
        let message = run(at, arguments).bad(1);
        assert!(message.contains("already exists") && message.contains("--force"), "{message}");
        assert_eq!(fs::read(at.join("out.safetensors")).unwrap(), b"precious");
    }
    run(at, &["prune", "model.safetensors", "-o", "out.safetensors", "--force"]).good();
    run(at, &["check", "out.safetensors"]).good();
    // A directory with anything in it, for a sharded model.
    fs::create_dir(at.join("in")).unwrap();
    fs::create_dir(at.join("full")).unwrap();
    fs::write(at.join("full/readme"), "precious").unwrap();
    write(&at.join("in/a.safetensors"), &[("l.0.weight", random(&[8, 16]))]);
    fs::write(at.join("in/model.safetensors.index.json"), r#"{"weight_map": {"l.0.weight": "a.safetensors"}}"#)
        .unwrap();
    let message = run(at, &["prune", "in", "-o", "full"]).bad(1);
    assert!(message.contains("full: already exists") && message.contains("--force"), "{message}");
    assert_eq!(names(&at.join("full")), ["readme"]);
    // Over its own input, too.
    run(at, &["prune", "out.safetensors", "-o", "out.safetensors", "--force", "--pattern", "1:4"]).good();
    run(at, &["check", "out.safetensors", "--pattern", "1:4"]).good();
}

#[test]
fn no_room_to_write_leaves_nothing_behind() {
    let (dir, _) = model();
    let at = dir.path();
    run(at, &["compress", "--prune", "model.safetensors", "-o", "small.safetensors"]).good();
    fs::create_dir(at.join("in")).unwrap();
    fs::copy(at.join("model.safetensors"), at.join("in/a.safetensors")).unwrap();
    let names_of_model = [
        "embed.weight",
        "layers.0.up.weight",
        "layers.0.up.bias",
        "layers.0.norm.weight",
        "layers.0.down.weight",
        "head.weight",
    ];
    let map: Vec<String> = names_of_model.iter().map(|n| format!(r#""{n}": "a.safetensors""#)).collect();
    fs::write(at.join("in/model.safetensors.index.json"), format!(r#"{{"weight_map": {{{}}}}}"#, map.join(", ")))
        .unwrap();
    // A limit on file sizes of one block stands in for a full disk; the signal it sends is ignored, as a full disk
    // sends none.
    for command in [
        "prune model.safetensors -o out.safetensors",
        "compress --prune model.safetensors -o out.safetensors",
        "decompress small.safetensors -o out.safetensors",
        "prune in -o out",
    ] {
        let script = format!("trap '' XFSZ; ulimit -f 1; exec \"$0\" {command}");
        let output = std::process::Command::new("sh")
            .args(["-c", &script, env!("CARGO_BIN_EXE_twofour")])
            .current_dir(at)
            .output()
            .unwrap();
        let message = support::Ran::from(output).bad(1);
        assert!(message.contains("out") && message.contains("writing: File too large"), "{command}: {message}");
        assert_eq!(names(at), ["in", "model.safetensors", "small.safetensors"], "{command}");
    }
    let message = run(dir.path(), &["prune", "model.safetensors", "-o", "missing/out.safetensors"]).bad(1);
    assert!(message.contains("missing"), "{message}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_stdout_is_an_error() {
    let (dir, _) = model();
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output =
        twofour().args(["inspect", "model.safetensors"]).current_dir(dir.path()).stdout(full).output().unwrap();
    assert!(support::Ran::from(output).bad(1).contains("writing to stdout"));
}

#[test]
fn what_is_asked_wrongly_has_exit_code_2() {
    let (dir, _) = model();
    for arguments in [
        ["frobnicate"].as_slice(),
        &["prune", "model.safetensors"],
        &["prune", "model.safetensors", "-o", "x", "--pattern", "5:4"],
        &["prune", "model.safetensors", "-o", "x", "--include", "[a"],
        &["check", "model.safetensors", "--quiet", "--json"],
        &["advise"],
        &["advise", "--shape", "12"],
        &["advise", "--shape", "4x4", "--tokens", "0"],
        &["completions", "tcsh"],
    ] {
        let ran = run(dir.path(), arguments);
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{arguments:?}: {ran:?}");
        assert!(ran.stderr.starts_with("error: "), "{ran:?}");
    }
    assert_eq!(names(dir.path()), ["model.safetensors"]);
}
