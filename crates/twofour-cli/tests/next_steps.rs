//! The commands that a command names at its end: they are there, and they run as they stand.
#![cfg(unix)]

use std::{fs, path::Path, process::Command};

use crate::support::{Ran, checkpoint, run};

/// The commands that a run ended with.
#[track_caller]
fn told(ran: &Ran) -> Vec<String> {
    let (_, next) = ran.stdout.split_once("\nNext: ").unwrap_or_else(|| panic!("no next step: {ran:?}"));
    next.lines().map(|line| line.trim().to_owned()).collect()
}

/// Runs a command line as a shell does, with the words that stand for a person's own replaced.
fn typed(at: &Path, line: &str) -> Ran {
    let line = line.replace(" TEXT", " text.txt").replace(" DENSE", " plain");
    let folder = Path::new(env!("CARGO_BIN_EXE_twofour")).parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    Command::new("sh").args(["-c", &line]).env("PATH", path).current_dir(at).output().unwrap().into()
}

#[test]
fn every_command_ends_with_commands_that_run() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    fs::write(at.join("text.txt"), "two of four\nthe mask\na weight\nrows are cut\n".repeat(8)).unwrap();
    let [llama, bert, masked] = ["llama", "bert", "bert_masked"].map(checkpoint);
    let commands: [&[&str]; 12] = [
        &["prune", &bert, "-o", "pruned-bert"],
        &["inspect", &llama],
        &["eval", &llama, "--text", "text.txt"],
        &["prune", &llama, "-o", "it's pruned"],
        &["check", "it's pruned"],
        &["eval", "it's pruned", "--text", "text.txt"],
        &["compress", "it's pruned", "-o", "small"],
        &["eval", "small", "--text", "text.txt"],
        &["quantize", "it's pruned", "-o", "int8", "--dtype", "int8"],
        &["decompress", "int8", "-o", "dense"],
        &["eval", &masked, "--text", "text.txt"],
        &["eval", &bert, "--text", "text.txt", "--against", &bert],
    ];
    let mut ran = vec![];
    for arguments in commands {
        let next = told(&run(at, arguments).good());
        assert!(next.iter().all(|line| line.starts_with("twofour ")), "{arguments:?}: {next:?}");
        // Measuring takes its time, and has tests of its own.
        for line in next.into_iter().filter(|line| !line.starts_with("twofour advise")) {
            if ran.contains(&line) {
                continue;
            }
            let result = typed(at, &line);
            // A dense model is checked to be told what to do.
            let is_answer = line.starts_with("twofour check") && result.code == Some(1) && result.stderr.is_empty();
            assert!(result.code == Some(0) || is_answer, "{arguments:?}, {line}: {result:?}");
            ran.push(line);
        }
    }
    assert!(ran.len() > 8, "{ran:?}");
}

#[test]
fn nothing_but_the_answer_is_printed_for_programs() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    fs::write(at.join("text.txt"), "two of four\n".repeat(8)).unwrap();
    let llama = checkpoint("llama");
    for arguments in [&["eval", &llama, "--text", "text.txt"][..], &["inspect", &llama]] {
        assert!(run(at, &[arguments, &["--json"]].concat()).good().json().is_object());
        assert_eq!(run(at, &[arguments, &["--quiet"]].concat()).good().stdout, "");
    }
    // Text that goes to a file is the model's alone.
    let written = run(at, &["generate", &llama, "--prompt", "two", "--length", "3"]).good().stdout;
    assert!(written.starts_with("two") && !written.contains("Next:"), "{written}");
}
