//! Runs of `train` with the recipe of a test's folder.

use std::{fs, path::Path, process::Stdio, thread::sleep, time::Duration};

use super::{Ran, run, twofour};

/// Writes the plan of a quickstart with a tiny model, as an interrupted run leaves it, and its text.
pub fn tiny_quickstart(folder: &Path, minutes: f64, steps: u64) {
    let plan = serde_json::json!({
        "minutes": minutes,
        "seed": 0,
        "model": {"layers": 1, "width": 32, "heads": 2, "context": 32, "feed_forward": 64},
        "training": {
            "batch": 2, "steps": steps, "learning_rate": 3e-3, "final_learning_rate": 3e-4, "warm_up": 4,
            "weight_decay": 0.1, "clip_norm": 1.0, "seed": 0
        },
        "sparse_layers": ["blocks.*"]
    });
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("plan.json"), plan.to_string()).unwrap();
    let text: String = (0..400).map(|i| format!("let x{} = two_of_four({});\n", i % 7, i % 5)).collect();
    fs::write(folder.join("text"), text).unwrap();
}

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

/// Trains one run to its end and kills another so many milliseconds after each of its starts, then lets it end, and
/// expects the same bytes of both in these files.
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
