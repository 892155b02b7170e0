//! Runs of `train` with the recipe of a test's folder.

use std::{fs, path::Path, process::Stdio, thread::sleep, time::Duration};

use super::{Ran, run, twofour};

/// Writes `recipe.toml` of a model that trains in milliseconds, and its text.
pub fn tiny_recipe(at: &Path) {
    fs::write(at.join("text.txt"), "the two of every four ".repeat(40)).unwrap();
    let recipe = r#"
        [model]
        layers = 1
        width = 16
        heads = 2
        context = 16
        [training]
        batch = 2
        steps = 8
        warm_up = 2
        validation_sequences = 2
        validate_every = 4
        checkpoint_every = 4
        [data]
        text = ["text.txt"]
    "#;
    fs::write(at.join("recipe.toml"), recipe).unwrap();
}

fn arguments<'a>(out: &'a str, sets: &[&'a str]) -> Vec<&'a str> {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    ["train", "recipe.toml", "-o", out].into_iter().chain(sets).collect()
}

/// Trains by `recipe.toml`, with these keys set.
pub fn train(at: &Path, out: &str, sets: &[&str]) -> Ran {
    run(at, &arguments(out, sets))
}

/// Trains one run to its end and kills another so many milliseconds after each of its starts, then lets it end, and expects the same bytes of both in these files.
#[track_caller]
pub fn expect_killed_runs_end_alike(at: &Path, sets: &[&str], delays: &[u64], files: &[&str]) {
    train(at, "whole", sets).good();
    let last = at.join("killed/last/checkpoint.safetensors");
    for delay in delays {
        let mut command = twofour();
        command.args(arguments("killed", sets)).current_dir(at).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        while !last.exists() {
            assert!(child.try_wait().unwrap().is_none(), "ended without a checkpoint");
            sleep(Duration::from_millis(2));
        }
        sleep(Duration::from_millis(*delay));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    train(at, "killed", sets).good();
    for file in files {
        let read = |folder: &str| fs::read(at.join(folder).join(file)).unwrap();
        assert!(read("whole") == read("killed"), "{file}");
    }
}
