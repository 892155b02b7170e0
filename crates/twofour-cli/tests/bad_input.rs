//! Bad input: a clear message, exit code 1 or 2, nothing half-written.

mod support;

use std::fs;

use support::{model, names, random, run, twofour, write};

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
    let overlap = r#"{"a.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b.weight":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}"#;
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

#[test]
fn a_path_that_is_no_model_is_named() {
    let dir = tempfile::tempdir().unwrap();
    assert!(run(dir.path(), &["check", "missing.safetensors"]).bad(1).contains("missing.safetensors"));
    fs::create_dir(dir.path().join("empty")).unwrap();
    assert!(run(dir.path(), &["inspect", "empty"]).bad(1).contains("no .safetensors file"));
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
    // Over its own input, too.
    run(at, &["prune", "out.safetensors", "-o", "out.safetensors", "--force", "--pattern", "1:4"]).good();
    run(at, &["check", "out.safetensors", "--pattern", "1:4"]).good();
}

#[test]
fn no_room_to_write_leaves_nothing_behind() {
    let (dir, _) = model();
    // A limit on file sizes of one block stands in for a full disk; the signal it sends is ignored, as a full disk sends none.
    let script = "trap '' XFSZ; ulimit -f 1; exec \"$0\" prune model.safetensors -o out.safetensors";
    let output = std::process::Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_twofour")])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let message = support::Ran::from(output).bad(1);
    assert!(message.contains("File too large"), "{message}");
    assert_eq!(names(dir.path()), ["model.safetensors"]);
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
