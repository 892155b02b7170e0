//! Ctrl-C while a model is being written: exit code 130, no output, nothing half-written. `kill -9`: nothing
//! half-written.
#![cfg(unix)]

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    thread::sleep,
    time::Duration,
};

use crate::support::{self, names, run, twofour, write};

/// So many tensors that their log is longer than a pipe holds, by far: whoever does not read it stops the command.
const TENSORS: usize = 3000;

/// Runs a command that writes `out.safetensors`, sends it the signal in the middle and gives its exit code.
///
/// The command logs a line for every tensor, and we decide how fast: it cannot be at its end before almost all is read.
fn interrupted(directory: &Path, arguments: &[&str], signal: &str) -> Option<i32> {
    let mut child = twofour()
        .args(arguments)
        .env("TWOFOUR_LOG", "twofour=debug")
        .current_dir(directory)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    let writing = log.by_ref().map(Result::unwrap).find(|line| line.contains("phase=Writing"));
    assert!(writing.is_some(), "the command ended before it wrote anything");
    let kill = format!("kill -{signal} {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    // Line by line, so that the thread that waits for the signal has seconds to see it.
    let mut read = 0;
    for line in log {
        line.unwrap();
        read += 1;
        sleep(Duration::from_millis(1));
    }
    assert!(read < TENSORS - 1, "the command wrote everything all the same");
    child.wait().unwrap().code()
}

#[test]
fn a_signal_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let name = |i| format!("layers.{i}.{}.weight", "x".repeat(100));
    let tensors: Vec<(String, support::Floats)> =
        (0..TENSORS).map(|i| (name(i), (vec![8, 8], [1.0, 0.0, 2.0, 0.0].repeat(16)))).collect();
    let tensors: Vec<(&str, support::Floats)> = tensors.iter().map(|(n, t)| (n.as_str(), t.clone())).collect();
    write(&at.join("dense.safetensors"), &tensors);
    run(at, &["compress", "dense.safetensors", "-o", "small.safetensors", "--quiet"]).good();

    for (command, input, signal) in [
        ("prune", "dense.safetensors", "INT"),
        ("compress", "dense.safetensors", "INT"),
        ("compress", "dense.safetensors", "TERM"),
        ("decompress", "small.safetensors", "INT"),
    ] {
        let code = interrupted(at, &[command, input, "-o", "out.safetensors"], signal);
        assert_eq!(code, Some(130), "{command}");
        assert_eq!(names(at), ["dense.safetensors", "small.safetensors"], "{command}");
    }
    // Nobody can clean up after `kill -9`: the file that is being written has no name, or the next command removes it.
    assert_eq!(interrupted(at, &["prune", "dense.safetensors", "-o", "out.safetensors"], "KILL"), None);
    let left = names(at);
    if left.len() == 2 {
        assert_eq!(left, ["dense.safetensors", "small.safetensors"]);
    } else {
        assert!(left[0].starts_with(".twofour-") && left[0].ends_with(".tmp"), "{left:?}");
        eprintln!("this file system has no files without a name");
    }
    run(at, &["decompress", "small.safetensors", "-o", "again.safetensors", "--quiet"]).good();
    assert_eq!(names(at), ["again.safetensors", "dense.safetensors", "small.safetensors"]);
    std::fs::remove_file(at.join("again.safetensors")).unwrap();
    // An output that is to be replaced stays.
    std::fs::write(at.join("out.safetensors"), "precious").unwrap();
    let code = interrupted(at, &["compress", "dense.safetensors", "-o", "out.safetensors", "--force"], "INT");
    assert_eq!(code, Some(130));
    assert_eq!(std::fs::read(at.join("out.safetensors")).unwrap(), b"precious");
    assert_eq!(names(at).len(), 3);
}
