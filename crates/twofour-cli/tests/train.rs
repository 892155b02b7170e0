//! `train`, end to end: every recipe of the repository for twenty tiny steps, kills and interruptions at random
//! moments, wrong recipes.

use std::{
    fs,
    path::Path,
    process::{Child, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use crate::support::{Ran, names, read_json, run, twofour};
use serde_json::Value;

const METHODS: [&str; 10] =
    ["dense", "fixed", "ste", "sr-ste", "fst", "s-ste", "step", "gradual", "activation", "sparsifier"];

fn recipe(method: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{method}.toml")).display().to_string()
}

/// Overrides that make a recipe of the repository tiny.
const TINY: [&str; 10] = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.context=16",
    "training.batch=2",
    "training.warm_up=4",
    "training.validation_sequences=4",
    "training.validate_every=10",
    "training.checkpoint_every=5",
    "training.steps=20",
];

fn arguments(method: &str, folder: &str, more: &[&str]) -> Vec<String> {
    let mut arguments = vec!["train".to_owned(), recipe(method), "-o".to_owned(), folder.to_owned()];
    for set in TINY.iter().chain(more) {
        arguments.extend(["--set".to_owned(), (*set).to_owned()]);
    }
    arguments
}

fn train(directory: &Path, method: &str, folder: &str, more: &[&str]) -> Ran {
    let arguments = arguments(method, folder, more);
    run(directory, &arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

fn lines(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The metrics without what the clock decides.
fn timeless(folder: &Path) -> Vec<Value> {
    let mut lines = lines(folder);
    lines.iter_mut().for_each(|line| assert!(line.as_object_mut().unwrap().remove("tokens_per_s").is_some()));
    lines
}

#[test]
fn every_recipe_trains_twenty_tiny_steps() {
    let directory = tempfile::tempdir().unwrap();
    for method in METHODS {
        let more: &[&str] = if method == "fst" { &["sparsity.mask_every=4"] } else { &[] };
        let ran = train(directory.path(), method, method, more).good();
        assert!(ran.stdout.contains("validation loss") && ran.stdout.contains("report.svg"), "{ran:?}");
        let folder = directory.path().join(method);
        let left = ["best", "last", "lock", "metrics.jsonl", "model.safetensors", "recipe.toml", "report.json"];
        assert_eq!(names(&folder), [left.as_slice(), &["report.svg"]].concat());
        let lines = lines(&folder);
        assert_eq!(lines.len(), 20);
        for (step, line) in lines.iter().enumerate() {
            assert_eq!(line["step"], step);
            for key in ["loss", "learning_rate", "gradient_norm", "tokens_per_s"] {
                assert!(line[key].as_f64().unwrap() > 0.0, "{method} {key}: {line}");
            }
            assert_eq!(line["val_loss"].is_number(), step == 9 || step == 19, "{method}: {line}");
        }
        let flips = lines.iter().filter(|line| line["flip_rate"].as_f64().unwrap() > 0.0).count();
        match method {
            "dense" | "fixed" | "activation" => assert_eq!(flips, 0, "{method}"),
            _ => assert!(flips > 0, "{method}"),
        }
        let report = read_json(folder.join("report.json"));
        // A uniform guess has ln 256 = 5.545.
        assert!(report["val_loss"].as_f64().unwrap() < 5.6, "{report}");
        assert_eq!(report["recipe"]["sparsity"]["method"], method);
        assert_eq!(report["val_loss"], lines[19]["val_loss"]);
        let svg = fs::read_to_string(folder.join("report.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("polyline"));
        // Sparse at the end: all but dense, FST, whose end is dense, and 2:4 activations, whose weights are. The
        // sparsifier's blocks are 2:4 at level 1.
        let check = run(directory.path(), &["inspect", &format!("{method}/model.safetensors"), "--json"]).good().stdout;
        assert_eq!(check.contains("2:4"), !["dense", "fst", "activation"].contains(&method), "{method}: {check}");
        let generate = ["generate", method, "--prompt", "the ", "--bytes", "20", "--json"];
        assert_eq!(run(directory.path(), &generate).good().json()["tokens"], 20, "{method}");
        let eval = ["eval", method, "--text", "text.txt", "--json"];
        fs::write(directory.path().join("text.txt"), "the two of every four ".repeat(20)).unwrap();
        let perplexity = run(directory.path(), &eval).good().json()["perplexity"].as_f64().unwrap();
        // A uniform guess has 256.
        assert!(perplexity > 1.0 && perplexity < 300.0, "{method}: {perplexity}");
        // Again: nothing is trained, and the report is the same.
        let mut again = arguments(method, method, more);
        again.push("--json".to_owned());
        let again = run(directory.path(), &again.iter().map(String::as_str).collect::<Vec<_>>()).good().json();
        assert_eq!(again, report);
    }
}

/// The steps after which a layer's level was another, with the levels.
fn levels(folder: &Path, layer: &str) -> Vec<(usize, f64)> {
    let mut found = vec![(0, 0.0)];
    for (step, line) in lines(folder).iter().enumerate() {
        match line["layers"][layer]["level"].as_f64() {
            Some(level) if found.last().unwrap().1 != level => found.push((step, level)),
            _ => {}
        }
    }
    found.split_off(1)
}

#[test]
fn the_recipes_of_strategies_prune_when_they_say() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let levels = |name: &str| {
        train(at, name, name, &["model.layers=2", "training.validate_every=1"]).good();
        let inspected = run(at, &["inspect", &format!("{name}/model.safetensors"), "--json"]).good().stdout;
        assert!(inspected.contains("2:4"), "{name}: {inspected}");
        ["blocks.0.mlp.up", "blocks.1.mlp.down"].map(|layer| levels(&at.join(name), layer))
    };
    assert_eq!(levels("one-shot"), [[(9, 1.0)], [(9, 1.0)]]);
    assert_eq!(levels("layer-by-layer"), [[(9, 1.0)], [(3, 1.0)]]);
    let iterative = vec![(1, 0.25), (5, 0.5), (9, 0.75), (13, 1.0)];
    assert_eq!(levels("iterative"), [iterative.clone(), iterative]);
    levels("learned-masks");
    let flips: Vec<f64> =
        lines(&at.join("learned-masks")).iter().map(|line| line["flip_rate"].as_f64().unwrap()).collect();
    assert!(flips[..9].iter().all(|rate| *rate > 0.0) && flips[10..].iter().all(|rate| *rate == 0.0), "{flips:?}");
}

#[test]
fn the_decay_is_searched_once_and_an_interrupted_search_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let more = ["sparsity.mask_every=4", "sparsity.decay_grid=[1e-5, 1e-3, 1.0]", "sparsity.decay_trial_steps=6"];
    let whole = train(directory.path(), "fst-auto", "whole", &more).good();
    assert!(whole.stdout.contains("4 trials of 6 steps") && whole.stdout.contains("ratio to dense"), "{whole:?}");
    let file = read_json(directory.path().join("whole/decay.json"));
    let strength = file["choice"]["strength"].as_f64().unwrap();
    assert_eq!(file["trials"].as_array().unwrap().len(), 4);
    let report = read_json(directory.path().join("whole/report.json"));
    assert_eq!(report["decay"], file["choice"]);
    assert!(lines(&directory.path().join("whole")).iter().all(|line| line["decay"].as_f64() == Some(strength)));
    // What a kill between two trials leaves.
    let begun = directory.path().join("begun");
    fs::create_dir(&begun).unwrap();
    fs::copy(directory.path().join("whole/recipe.toml"), begun.join("recipe.toml")).unwrap();
    let mut partial = file.clone();
    partial["trials"].as_array_mut().unwrap().truncate(2);
    partial["choice"] = Value::Null;
    fs::write(begun.join("decay.json"), partial.to_string()).unwrap();
    train(directory.path(), "fst-auto", "begun", &more).good();
    assert_eq!(read_json(begun.join("decay.json")), file);
    assert_eq!(timeless(&begun), timeless(&directory.path().join("whole")));
    // A file of other trials, and one that is damaged.
    let mut other = partial;
    other["search"]["steps"] = 7.into();
    for (text, word) in [(other.to_string(), "another search"), ("{".to_owned(), "EOF")] {
        let folder = directory.path().join("other");
        fs::create_dir_all(&folder).unwrap();
        fs::copy(begun.join("recipe.toml"), folder.join("recipe.toml")).unwrap();
        fs::write(folder.join("decay.json"), text).unwrap();
        let message = train(directory.path(), "fst-auto", "other", &more).bad(2);
        assert!(message.contains(word) && message.contains("decay.json"), "{message}");
    }
}

#[test]
fn simulated_8_bit_floats_are_said_and_train() {
    let directory = tempfile::tempdir().unwrap();
    let ran = train(directory.path(), "s-ste-fp8", "run", &[]).good();
    assert!(ran.stdout.contains("simulated on a CPU"), "{ran:?}");
    train(directory.path(), "s-ste", "plain", &[]).good();
    let [rounded, plain] =
        ["run", "plain"].map(|name| lines(&directory.path().join(name))[0]["loss"].as_f64().unwrap());
    assert!(rounded != plain && (rounded - plain).abs() < 0.01 * plain, "{rounded}, {plain}");
}

#[test]
fn the_first_losses_are_those_of_dense_where_layers_are_dense() {
    let directory = tempfile::tempdir().unwrap();
    train(directory.path(), "dense", "dense", &[]).good();
    train(directory.path(), "ste", "late", &["sparsity.begin=0.5"]).good();
    train(directory.path(), "ste", "early", &[]).good();
    let [dense, late, early] = ["dense", "late", "early"].map(|name| lines(&directory.path().join(name)));
    for step in 0..10 {
        assert_eq!(dense[step]["loss"], late[step]["loss"], "{step}");
    }
    assert_ne!(dense[11]["loss"], late[11]["loss"]);
    assert_ne!(dense[0]["loss"], early[0]["loss"]);
}

fn start(directory: &Path, method: &str, folder: &str, more: &[&str]) -> Child {
    let mut command = twofour();
    command.args(arguments(method, folder, more)).current_dir(directory);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn wait_for(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(120), "waited in vain for {what}");
        sleep(Duration::from_millis(2));
    }
}

/// Kills a run `kills` times at random moments, and compares with one that nobody disturbed.
fn survives_kills(method: &str, kills: u32, steps: u32) {
    let directory = tempfile::tempdir().unwrap();
    let steps = format!("training.steps={steps}");
    let more =
        [steps.as_str(), "training.checkpoint_every=3", "training.validate_every=7", "training.keep_checkpoints=2"];
    let begun = Instant::now();
    train(directory.path(), method, "whole", &more).good();
    let length = begun.elapsed();
    let mut state = 0x9E37_79B9_7F4A_7C15u64 ^ u64::from(kills);
    let checkpoint = directory.path().join("killed/last/checkpoint.safetensors");
    for kill in 0..kills {
        let mut child = start(directory.path(), method, "killed", &more);
        if kill == 0 {
            wait_for("a checkpoint", || checkpoint.exists());
        }
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        sleep(length.mul_f64((state >> 40) as f64 / (1u64 << 24) as f64 * 0.6));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    train(directory.path(), method, "killed", &more).good();
    let [whole, killed] = ["whole", "killed"].map(|name| directory.path().join(name));
    assert_eq!(timeless(&whole), timeless(&killed));
    for file in ["model.safetensors", "last/checkpoint.safetensors", "best/checkpoint.safetensors"] {
        assert!(
            fs::read(whole.join(file)).unwrap() == fs::read(killed.join(file)).unwrap(),
            "{method}: {file} differs"
        );
    }
    assert_eq!(names(&whole.join("checkpoints")), names(&killed.join("checkpoints")));
    assert_eq!(names(&whole.join("checkpoints")).len(), 2);
    assert!(!names(&killed).iter().any(|name| name.ends_with(".tmp")), "{:?}", names(&killed));
}

#[test]
fn a_run_killed_at_random_moments_ends_as_if_undisturbed() {
    survives_kills("fst", 5, 300);
    survives_kills("step", 3, 300);
    survives_kills("sparsifier", 3, 300);
}

#[test]
#[ignore = "takes minutes: a hundred kills"]
fn a_run_killed_a_hundred_times_ends_as_if_undisturbed() {
    for method in METHODS {
        survives_kills(method, 15, 600);
    }
}

#[test]
#[cfg(unix)]
fn an_interrupted_run_saves_and_goes_on_and_the_folder_is_locked_meanwhile() {
    let directory = tempfile::tempdir().unwrap();
    let more = ["training.steps=100000", "training.checkpoint_every=0", "training.validate_every=0"];
    let child = start(directory.path(), "s-ste", "run", &more);
    let metrics = directory.path().join("run/metrics.jsonl");
    wait_for("the first steps", || fs::metadata(&metrics).is_ok_and(|file| file.len() > 1000));

    let refused = train(directory.path(), "s-ste", "run", &more).bad(2);
    assert!(refused.contains(&format!("process {} trains in this folder", child.id())), "{refused}");

    let kill = ["-INT".to_owned(), child.id().to_string()];
    assert!(std::process::Command::new("kill").args(kill).status().unwrap().success());
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(130), "{ran:?}");
    assert!(ran.stderr.contains("run the same command again") && ran.stdout.contains("saved at step"), "{ran:?}");
    let steps = lines(&directory.path().join("run")).len();
    assert!(steps > 0);

    let child = start(directory.path(), "s-ste", "run", &more);
    wait_for("more steps", || fs::metadata(&metrics).is_ok_and(|file| file.len() > 400 * steps as u64));
    let kill = ["-TERM".to_owned(), child.id().to_string()];
    assert!(std::process::Command::new("kill").args(kill).status().unwrap().success());
    let ran = Ran::from(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(130));
    assert!(ran.stdout.contains(&format!("going on from step {steps} of 100000\n")), "{ran:?}");
    let lines = lines(&directory.path().join("run"));
    assert!(lines.len() > steps && lines.iter().enumerate().all(|(step, line)| line["step"] == step));
}

#[test]
fn another_recipe_and_foreign_folders_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    train(directory.path(), "ste", "run", &[]).good();
    let refused = train(directory.path(), "ste", "run", &["training.learning_rate=5e-4", "sparsity.end=0.9"]).bad(2);
    for words in ["training.learning_rate: 0.002 there, 0.0005 here", "sparsity.end: absent there, 0.9 here"] {
        assert!(refused.contains(words), "{refused}");
    }
    assert!(!refused.contains("training.seed"), "{refused}");
    // The same recipe on other text.
    fs::write(directory.path().join("other.txt"), "two of every four ".repeat(100)).unwrap();
    let other = train(directory.path(), "ste", "run", &["data.text=['other.txt']"]).bad(1);
    assert!(other.contains("run") && other.contains("other data"), "{other}");

    fs::create_dir(directory.path().join("home")).unwrap();
    fs::write(directory.path().join("home/thesis.tex"), "precious").unwrap();
    let message = train(directory.path(), "ste", "home", &[]).bad(2);
    assert!(message.contains("holds no training run"), "{message}");
    assert_eq!(names(&directory.path().join("home")), ["thesis.tex"]);
    assert!(train(directory.path(), "ste", "home/thesis.tex", &[]).bad(2).contains("not a folder"));
}

#[test]
fn a_damaged_recipe_is_an_error_that_names_the_file() {
    let directory = tempfile::tempdir().unwrap();
    train(directory.path(), "ste", "run", &[]).good();
    // A recipe that ends within a line is none. One that ends between two lines is another recipe.
    let path = directory.path().join("run/recipe.toml");
    let recipe = fs::read(&path).unwrap();
    let line = recipe.windows(8).position(|part| part == b"steps = ").unwrap();
    for damaged in [&recipe[..line + "steps =".len()], &recipe[..line], b"\xFF", b""] {
        fs::write(&path, damaged).unwrap();
        let ran = train(directory.path(), "ste", "run", &[]);
        assert!(matches!(ran.code, Some(1 | 2)) && ran.stderr.contains("recipe.toml"), "{ran:?}");
    }
    fs::write(&path, recipe).unwrap();
    train(directory.path(), "ste", "run", &[]).good();
}

/// A run that has succeeded with a warning.
fn warned(ran: Ran) -> Ran {
    assert!(ran.code == Some(0) && ran.stderr.starts_with("warning: "), "{ran:?}");
    ran
}

/// Cuts a file in half, as a full disk or a copy that was interrupted does.
fn cut(path: &Path) {
    let good = fs::read(path).unwrap();
    fs::write(path, &good[..good.len() / 2]).unwrap();
}

#[test]
fn a_run_goes_on_from_whatever_checkpoint_is_whole_and_ends_as_if_undisturbed() {
    let directory = tempfile::tempdir().unwrap();
    let more = ["training.keep_checkpoints=3"];
    let [whole, folder] = ["whole", "run"].map(|name| directory.path().join(name));
    train(directory.path(), "fst", "whole", &more).good();
    assert_eq!(names(&whole.join("checkpoints")), ["0000000010", "0000000015", "0000000020"]);
    let files = ["last", "best", "checkpoints/0000000020", "checkpoints/0000000015", "checkpoints/0000000010"];
    let files = files.map(|name| format!("{name}/checkpoint.safetensors"));
    let copy = || {
        for file in files.iter().map(String::as_str).chain(["recipe.toml", "metrics.jsonl"]) {
            let path = folder.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            // A file of its own: the run's are two names of one.
            fs::write(&path, fs::read(whole.join(file)).unwrap()).unwrap();
        }
    };
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        let place = bytes.len() * 3 / 4;
        bytes[place] ^= 0x10;
        fs::write(path, bytes).unwrap();
    };
    // How so many checkpoints are damaged, and the step to go on from.
    type Damage<'a> = &'a dyn Fn(&Path);
    let cases: [(Damage<'_>, usize, &str); 4] = [
        (&|path| fs::remove_file(path).unwrap(), 1, "20"),
        (&flip, 3, "15"),
        (&cut, 4, "10"),
        (&|path| fs::write(path, "").unwrap(), 4, "10"),
    ];
    for (damage, count, step) in cases {
        copy();
        files[..count].iter().for_each(|file| damage(&folder.join(file)));
        let ran = warned(train(directory.path(), "fst", "run", &more));
        assert!(ran.stderr.contains("last") && ran.stderr.contains(&format!(", step {step}\n")), "{step}: {ran:?}");
        assert_eq!(timeless(&folder), timeless(&whole));
        for file in ["model.safetensors", "last/checkpoint.safetensors"] {
            assert!(fs::read(whole.join(file)).unwrap() == fs::read(folder.join(file)).unwrap(), "{file} differs");
        }
    }
    // None is left that serves: nothing is begun anew.
    copy();
    files.iter().for_each(|file| flip(&folder.join(file)));
    let refused = train(directory.path(), "fst", "run", &more).bad(1);
    assert!(refused.contains("no checkpoint can be used") && refused.contains("checkpoints/0000000010"), "{refused}");
    assert_eq!(lines(&folder).len(), 20);
    files.iter().for_each(|file| fs::remove_file(folder.join(file)).unwrap());
    let refused = train(directory.path(), "fst", "run", &more).bad(2);
    assert!(refused.contains("the run is finished") && refused.contains("report.json"), "{refused}");
    fs::remove_file(folder.join("report.json")).unwrap();
    let ran = warned(train(directory.path(), "fst", "run", &more));
    assert!(ran.stderr.contains("no checkpoint to go on from; the run begins anew"), "{ran:?}");
    assert_eq!(timeless(&folder), timeless(&whole));
}

#[test]
fn the_checkpoints_of_a_run_are_models_and_converting_a_run_takes_its_model_alone() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    train(at, "ste", "run", &["training.keep_checkpoints=2"]).good();
    fs::write(at.join("text.txt"), "the two of every four ".repeat(20)).unwrap();
    let perplexity = |model: &str| {
        let eval = ["eval", model, "--text", "text.txt", "--dtype", "f32", "--json"];
        run(at, &eval).good().json()["perplexity"].as_f64().unwrap()
    };
    let last = perplexity("run/last");
    for same in ["run/checkpoints/0000000020", "run/last/checkpoint.safetensors"] {
        assert_eq!(perplexity(same), last, "{same}");
    }
    // The model itself is rounded to bf16.
    assert!((perplexity("run") / last - 1.0).abs() < 0.01);
    assert_ne!(perplexity("run/checkpoints/0000000015"), last);
    assert_eq!(run(at, &["generate", "run/best", "--bytes", "9", "--json"]).good().json()["tokens"], 9);
    train(at, "ste", "more", &["model.from='run/best'"]).good();

    for command in [&["prune"][..], &["compress"], &["quantize", "--dtype", "int8"]] {
        let refused = run(at, &[command, &["run/best", "-o", "out"]].concat()).bad(2);
        assert!(refused.contains("a checkpoint of a training run"), "{refused}");
    }
    run(at, &["prune", "run", "-o", "pruned"]).good();
    let left = names(&at.join("pruned"));
    assert!(left.iter().all(|name| name.contains("safetensors") || name.contains("README")), "{left:?}");
}

#[test]
fn damaged_metrics_do_not_stop_a_run() {
    let directory = tempfile::tempdir().unwrap();
    let [whole, folder] = ["whole", "run"].map(|name| directory.path().join(name));
    train(directory.path(), "ste", "whole", &[]).good();
    let text = fs::read_to_string(whole.join("metrics.jsonl")).unwrap();
    // How the text of the file is damaged, and the steps whose lines are lost.
    type Damage<'a> = &'a dyn Fn(&str) -> Vec<u8>;
    let damaged: [(Damage<'_>, &[u64]); 3] = [
        (&|text| text.replacen("\"step\":3,", "\"step\":\0,", 1).into_bytes(), &[3]),
        (&|text| text.lines().take(8).map(|line| format!("{line}\n")).collect::<String>().into_bytes(), &[8, 9]),
        (&|_| vec![0; 4096], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ];
    for (damage, lost) in damaged {
        // As if it was killed after ten steps.
        for name in ["best", "last"] {
            fs::create_dir_all(folder.join(name)).unwrap();
        }
        let kept = ["training.keep_checkpoints=3"];
        if !directory.path().join("kept").exists() {
            train(directory.path(), "ste", "kept", &kept).good();
        }
        let ten = directory.path().join("kept/checkpoints/0000000010/checkpoint.safetensors");
        fs::copy(ten, folder.join("last/checkpoint.safetensors")).unwrap();
        fs::copy(whole.join("recipe.toml"), folder.join("recipe.toml")).unwrap();
        fs::write(folder.join("metrics.jsonl"), damage(&text)).unwrap();
        let ran = warned(train(directory.path(), "ste", "run", &[]));
        assert!(ran.stderr.contains("metrics.jsonl") && ran.stderr.contains(&format!("{} of 10 steps", lost.len())));
        let mut expected = timeless(&whole);
        expected.retain(|line| !lost.contains(&line["step"].as_u64().unwrap()));
        assert_eq!(timeless(&folder), expected);
    }
    // Without the line of the step in `best`, its loss is unknown, and it stays.
    let best = |folder: &Path| fs::read(folder.join("best/checkpoint.safetensors")).unwrap();
    let ten = directory.path().join("kept/checkpoints/0000000010");
    for name in ["best", "last"] {
        fs::copy(ten.join("checkpoint.safetensors"), folder.join(name).join("checkpoint.safetensors")).unwrap();
    }
    let before = best(&folder);
    fs::write(folder.join("metrics.jsonl"), text.replacen("\"step\":9,", "\"step\":\0,", 1)).unwrap();
    let ran = warned(train(directory.path(), "ste", "run", &[]));
    assert!(ran.stderr.contains("step 10") && ran.stderr.contains("stays"), "{ran:?}");
    assert!(best(&folder) == before && best(&whole) != before);
    // Of a run that is finished the report is made of the last line.
    fs::write(folder.join("metrics.jsonl"), &text[..text.len() - 9]).unwrap();
    let refused = train(directory.path(), "ste", "run", &[]).bad(1);
    assert!(refused.contains("the last step") && refused.contains("last"), "{refused}");
}

#[test]
fn every_mistake_of_a_recipe_is_told_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let text = "[model]\nlayers = 1\nwidht = 16\nheads = 2\ncontext = 16\n[data]\ntext = 'a.txt'\n[training]\n\
                warm_up = 9999\n";
    fs::write(directory.path().join("bad.toml"), text).unwrap();
    let message = run(directory.path(), &["train", "bad.toml", "-o", "run", "--set", "sparsity.method=stee"]).bad(2);
    for words in [
        "bad.toml: 5 mistakes",
        "line 7: data.text: a.txt: No such file",
        "line 1: model.width: is missing",
        "line 3: model.widht: unknown key; did you mean `width`?",
        "line 9: training.warm_up: found 9999, beyond the run of 1000 steps",
        "override: sparsity.method: found \"stee\"; did you mean `ste`?",
    ] {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert!(!directory.path().join("run").exists());
    fs::write(directory.path().join("bad.toml"), text.replace("widht", "width").replace("9999", "9")).unwrap();
    let message = run(directory.path(), &["train", "bad.toml", "-o", "run"]).bad(2);
    assert!(message.contains("a.txt"), "{message}");
    assert!(run(directory.path(), &["train", "absent.toml", "-o", "run"]).bad(1).contains("absent.toml"));
    fs::write(directory.path().join("bad.toml"), b"\xff\xfe").unwrap();
    assert!(run(directory.path(), &["train", "bad.toml", "-o", "run"]).bad(2).contains("not UTF-8"));
    // Usage errors of clap.
    for arguments in [&["train", "bad.toml"][..], &["train", "bad.toml", "-o", "run", "--set", "nonsense"]] {
        assert_eq!(run(directory.path(), arguments).code, Some(2));
    }
    assert!(!directory.path().join("run").exists());
}

#[test]
fn a_dry_run_says_what_becomes_sparse_and_why_not() {
    let directory = tempfile::tempdir().unwrap();
    let ran = run(directory.path(), &["train", &recipe("fst"), "--dry-run"]).good();
    for words in ["blocks.0.mlp.up", "512x128", "2:4", "not in a feed-forward block", "from step 0 to 334", "moments"] {
        assert!(ran.stdout.contains(words), "{words}: {}", ran.stdout);
    }
    let odd = ["train", &recipe("ste"), "--dry-run", "--json", "--device", "cuda", "--set", "model.feed_forward=130"];
    let plan = run(directory.path(), &odd).good().json();
    assert_eq!(plan["layers"][3]["reason"], "in_features padded from 130 to 132");
    assert_eq!((plan["precision"].as_str(), plan["device"].as_str()), (Some("bf16"), Some("cuda")));
    assert_eq!(plan["memory"]["masters"].as_u64().unwrap(), 4 * plan["parameters"].as_u64().unwrap());
    let two = ["train", &recipe("ste"), "--dry-run", "--json", "--device", "cuda:0,1"];
    let (one, two) = (run(directory.path(), &two[..4]).good().json(), run(directory.path(), &two).good().json());
    assert_eq!((two["devices"].as_u64(), &two["step_tokens"]), (Some(2), &one["step_tokens"]));
    // Half the sequences, in half the bytes an element.
    let activations = |plan: &Value| plan["memory"]["activations"].as_u64().unwrap();
    assert_eq!(activations(&one), 4 * activations(&two));
    assert!(names(directory.path()).is_empty(), "a dry run writes nothing");
}

#[test]
fn a_loss_that_stays_infinite_stops_the_run_with_its_last_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let more = ["training.steps=100", "training.warm_up=12", "training.learning_rate=1e30", "training.clip_norm=0"];
    for method in ["dense", "ste", "fst"] {
        let ran = train(directory.path(), method, method, &more);
        assert_eq!(ran.code, Some(1), "{ran:?}");
        assert!(ran.stderr.contains("NaN or infinite; the update was skipped"), "{ran:?}");
        assert!(ran.stderr.contains("30 consecutive steps") && !ran.stderr.contains("panicked"), "{ran:?}");
        let lines = lines(&directory.path().join(method));
        let skipped = lines.iter().filter(|line| line["skipped"] == true).count();
        assert_eq!(skipped, 29, "the thirtieth ends the run");
        assert!(lines.iter().filter(|line| line["skipped"] == true).all(|line| line["gradient_norm"].is_null()));
        // The same command stops at the same step.
        let again = train(directory.path(), method, method, &more);
        assert_eq!((again.code, again.stderr.lines().last()), (Some(1), ran.stderr.lines().last()));
    }
}

#[test]
fn a_run_that_ends_with_skipped_steps_is_an_error_and_leaves_no_model() {
    let directory = tempfile::tempdir().unwrap();
    let ran = train(directory.path(), "ste", "run", &["training.learning_rate=1e30"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    for words in ["of 20 steps were skipped", "no model was written", "another folder (-o)", "NaN or infinite"] {
        assert!(ran.stderr.contains(words), "{words}: {ran:?}");
    }
    assert!(!ran.stdout.contains("training loss"), "{ran:?}");
    assert_eq!(names(&directory.path().join("run")), ["last", "lock", "metrics.jsonl", "recipe.toml"]);
    assert_eq!(lines(&directory.path().join("run")).len(), 20);
    // The same command has the same answer.
    let again = train(directory.path(), "ste", "run", &["training.learning_rate=1e30"]);
    assert_eq!((again.code, again.stderr.lines().last()), (Some(1), ran.stderr.lines().last()));
}

#[test]
fn a_divergence_says_what_can_be_done() {
    let directory = tempfile::tempdir().unwrap();
    let more = ["training.steps=100", "training.learning_rate=1e30", "training.checkpoint_every=0"];
    let ran = train(directory.path(), "dense", "run", &more);
    assert!(ran.code == Some(1) && ran.stderr.contains("stopped before the first checkpoint"), "{ran:?}");
    assert!(ran.stderr.contains("into a new folder") && !ran.stderr.contains("go on from"), "{ran:?}");
}

#[test]
fn a_folder_in_which_nothing_was_trained_is_taken_over() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("run");
    // Text of too few tokens, which is known once it is encoded.
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "two": 1, "of": 2, "four": 3}, "unk_token": "[UNK]"}
    });
    fs::write(directory.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let llama = ["model.kind=llama", "data.tokenizer=tokenizer.json", "data.text=['text']"];
    for (text, code) in [("a".repeat(2000), 1), ("two of four ".repeat(200), 0)] {
        fs::write(directory.path().join("text"), text).unwrap();
        let ran = train(directory.path(), "ste", "encoded", &llama);
        assert_eq!(ran.code, Some(code), "{ran:?}");
        assert_eq!(directory.path().join("encoded/recipe.toml").exists(), code == 0, "{ran:?}");
    }
    // What a kill before the first step leaves.
    train(directory.path(), "ste", "whole", &["training.seed=3"]).good();
    fs::create_dir_all(&folder).unwrap();
    fs::copy(directory.path().join("whole/recipe.toml"), folder.join("recipe.toml")).unwrap();
    fs::write(folder.join("metrics.jsonl"), "").unwrap();
    train(directory.path(), "ste", "run", &["training.seed=4"]).good();
    assert!(fs::read_to_string(folder.join("recipe.toml")).unwrap().contains("seed = 4"));
    // Not where steps were done, and not somebody's own file.
    let own = directory.path().join("own");
    fs::create_dir(&own).unwrap();
    let text = fs::read_to_string(directory.path().join("whole/recipe.toml")).unwrap();
    fs::write(own.join("recipe.toml"), format!("# mine\n{text}")).unwrap();
    for folder in ["whole", "own"] {
        let message = train(directory.path(), "ste", folder, &["training.seed=4"]).bad(2);
        assert!(message.contains("training.seed: 3 there, 4 here"), "{message}");
    }
    assert!(fs::read_to_string(own.join("recipe.toml")).unwrap().starts_with("# mine"));
}

#[test]
fn other_text_before_the_first_checkpoint_begins_anew_and_is_recorded() {
    let directory = tempfile::tempdir().unwrap();
    for (name, words) in [("a.txt", "two of every four "), ("b.txt", "other words for you ")] {
        fs::write(directory.path().join(name), words.repeat(100)).unwrap();
    }
    train(directory.path(), "ste", "run", &["data.text=['a.txt']"]).good();
    train(directory.path(), "ste", "whole", &["data.text=['b.txt']"]).good();
    let folder = directory.path().join("run");
    // A checkpoint of other text is none to go on from.
    fs::remove_dir_all(folder.join("last")).unwrap();
    let refused = train(directory.path(), "ste", "run", &["data.text=['b.txt']"]).bad(1);
    assert!(refused.contains("best") && refused.contains("other data"), "{refused}");
    fs::remove_dir_all(folder.join("best")).unwrap();
    fs::remove_file(folder.join("report.json")).unwrap();
    warned(train(directory.path(), "ste", "run", &["data.text=['b.txt']"]));
    let recipe = fs::read_to_string(folder.join("recipe.toml")).unwrap();
    assert!(recipe.contains("b.txt") && !recipe.contains("a.txt"), "{recipe}");
    assert_eq!(timeless(&folder), timeless(&directory.path().join("whole")));
}

#[test]
fn a_checkpoint_that_a_kill_left_unkept_is_kept_later() {
    let directory = tempfile::tempdir().unwrap();
    let more = ["training.keep_checkpoints=2"];
    train(directory.path(), "ste", "run", &more).good();
    let kept = directory.path().join("run/checkpoints");
    assert_eq!(names(&kept), ["0000000015", "0000000020"]);
    fs::remove_dir_all(kept.join("0000000020")).unwrap();
    train(directory.path(), "ste", "run", &more).good();
    assert_eq!(names(&kept), ["0000000015", "0000000020"]);
}

#[test]
fn parts_of_a_run_have_their_own_times() {
    let directory = tempfile::tempdir().unwrap();
    let part = "sparsity.override=[{layers=['blocks.0.attn.qkv'], method='ste'}]";
    let dry = |method: &str, more: &[&str]| {
        let dry: Vec<String> = [arguments(method, "dry", more), vec!["--dry-run".to_owned()]].concat();
        run(directory.path(), &dry.iter().map(String::as_str).collect::<Vec<_>>()).good().stdout
    };
    let shown = dry("fst", &[part]);
    for words in ["layers are 2:4: blocks.0.mlp.up and 1 more", "from step 0 to 17", "blocks.0.attn.qkv", "to 20"] {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    assert!(dry("gradual", &[]).contains("3:4 from step 2, 2:4 from step 6 to 20"));
    let ran = train(directory.path(), "fst", "run", &[part, "sparsity.mask_every=4"]).good();
    assert!(ran.stdout.contains("some of them only until step 17"), "{ran:?}");
    assert!(!ran.stdout.contains("dense at the end"), "{ran:?}");
    let report = read_json(directory.path().join("run/report.json"));
    assert_eq!(report["plan"]["sparse"][1], 20, "{report}");
    assert_eq!(report["plan"]["stages"][0]["end"], 17, "{report}");
    // STEP without bounds may end dense.
    train(directory.path(), "step", "step", &["sparsity.begin=0", "sparsity.switch_latest=1"]).good();
}

#[test]
#[cfg(target_os = "linux")]
fn a_run_beyond_the_memory_of_the_machine_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let message = train(directory.path(), "ste", "run", &["training.batch=1048576", "model.context=4096"]).bad(1);
    assert!(message.contains("this machine has") && message.contains("training.micro_batch"), "{message}");
    assert!(names(directory.path()).is_empty());
}

#[test]
fn devices_and_precisions_that_are_not_there_leave_no_folder() {
    let directory = tempfile::tempdir().unwrap();
    let message = train(directory.path(), "ste", "run", &["training.precision=bf16"]).bad(2);
    assert!(message.contains("training.precision") && message.contains("the CPU trains in"), "{message}");
    // Two of three GPUs may be there, but a batch of 8 is not divided evenly over three.
    for (device, code) in [("cuda:99", 1), ("cuda:98,99", 1), ("cuda:0,1,2", 2), ("cuda:0,0", 2), ("gpu", 2)] {
        let ran = run(directory.path(), &["train", &recipe("ste"), "-o", "run", "--device", device]);
        assert_eq!(ran.code, Some(code), "{device}: {ran:?}");
        assert!(!ran.stderr.contains("panicked"), "{ran:?}");
    }
    assert!(names(directory.path()).is_empty());
}

#[test]
#[cfg(target_os = "linux")]
fn a_folder_that_cannot_be_written_to_is_an_error_that_says_so() {
    // No user can create a folder in procfs.
    let directory = tempfile::tempdir().unwrap();
    let message = train(directory.path(), "ste", "/proc/twofour-run", &[]).bad(1);
    assert!(message.contains("/proc/twofour-run"), "{message}");
}

/// An IDX file of bytes.
fn idx(sizes: &[u32], values: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let sizes_there = sizes.iter().flat_map(|size| size.to_be_bytes());
    [0, 0, 8, sizes.len() as u8].into_iter().chain(sizes_there).chain(values).collect()
}

#[test]
fn a_vision_transformer_trains_on_images_and_damaged_images_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let pixel = |at: u32| if at % 64 / 32 == at / 64 % 2 { 200 } else { 20 };
    let images = idx(&[60, 8, 8], (0..60 * 64).map(pixel));
    fs::write(directory.path().join("images"), &images).unwrap();
    fs::write(directory.path().join("labels"), idx(&[60], (0..60).map(|i| i % 2))).unwrap();
    let train_from = |name: &str, folder: &str, more: &[&str]| {
        let mut arguments = vec!["train".to_owned(), recipe(name), "-o".to_owned(), folder.to_owned()];
        let tiny = ["model.layers=1", "model.width=16", "model.heads=2", "model.image=8", "model.classes=2"];
        let data = ["data.images=images", "data.labels=labels", "training.batch=8", "training.warm_up=4"];
        for set in tiny.iter().chain(&data).chain(&["training.steps=40"]).chain(more) {
            arguments.extend(["--set".to_owned(), (*set).to_owned()]);
        }
        run(directory.path(), &arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let train = |more: &[&str]| train_from("vit", "run", more);
    train(&[]).good();
    let diverged = train_from("vit", "diverged", &["training.learning_rate=1e30", "training.steps=20"]);
    assert!(diverged.code == Some(1) && diverged.stderr.contains("of 20 steps were skipped"), "{diverged:?}");
    train_from("study-vit", "study", &["sparsity.method=fst"]).good();
    let report: Value = serde_json::from_slice(&fs::read(directory.path().join("run/report.json")).unwrap()).unwrap();
    assert!(report["val_accuracy"].as_f64().unwrap() > 0.9, "{report}");
    // The images are two, with labels: any features tell them apart.
    assert_eq!(report["linear_probe"]["validation_accuracy"], 1.0, "{report}");
    assert_eq!((&report["data_bytes"], &report["data_tokens"]), (&Value::from(60 * 64), &Value::from(60 * 5)));
    assert_eq!(report["model"]["two_of_four"], 2, "{report}");
    assert!(directory.path().join("run/model.safetensors").exists());
    assert!(lines(&directory.path().join("run")).last().unwrap()["val_accuracy"].is_number());
    fs::write(directory.path().join("short"), &images[..1000]).unwrap();
    for (set, word) in [
        ("data.images=short", "truncated"),
        ("data.images=labels", "images begin with"),
        ("data.images=absent", "absent"),
        ("model.classes=1", "there are 1 classes"),
        ("model.image=12", "8 x 8"),
        ("model.patch=3", "divisor"),
        ("model.context=9", "image and patch decide"),
        ("data.text=images", "give data.images"),
        ("model.kind=gpt", "only a \"vit\" has it"),
    ] {
        let message = train(&[set]).bad(2);
        assert!(message.contains(word), "{set}: {message}");
    }
}

#[test]
fn a_sparsifier_leaves_its_zeros_and_its_levels() {
    let directory = tempfile::tempdir().unwrap();
    let own = [
        "sparsity.sparsifier.block=[4, 4]",
        "sparsity.sparsifier.zeros_per_block=16",
        "sparsity.sparsifier.level=0.75",
        "sparsity.mask_every=5",
    ];
    let mut dry = arguments("sparsifier", "run", &own);
    dry.push("--dry-run".to_owned());
    let dry: Vec<&str> = dry.iter().map(String::as_str).collect();
    let shown = run(directory.path(), &dry).good().stdout;
    for words in
        ["masked", "prunes 16 of 16 in blocks [4, 4]", "with regrowth", "after step", "75.0 %", "layers are masked"]
    {
        assert!(shown.contains(words), "{words}: {shown}");
    }
    let plan = run(directory.path(), &[&dry[..], &["--json"]].concat()).good().json();
    assert_eq!(plan["levels"][0]["levels"][0], serde_json::json!([2, 0.0]));
    assert_eq!(plan["levels"][0]["levels"].as_array().unwrap().last().unwrap(), &serde_json::json!([14, 0.75]));
    assert_eq!((plan["sparse_weights"].as_u64(), plan["masked_weights"].as_u64()), (Some(0), Some(2 * 16 * 64)));

    let ran = train(directory.path(), "sparsifier", "run", &own).good();
    assert!(ran.stdout.contains("zeros of masked layers"), "{ran:?}");
    let folder = directory.path().join("run");
    let lines = lines(&folder);
    let levels = |step: usize| lines[step]["layers"]["blocks.0.mlp.up"]["level"].as_f64();
    // At rare masks, and where the run was validated.
    assert_eq!(lines[4]["layers"].as_object().map(|layers| layers.len()), Some(2), "{}", lines[4]);
    assert!(levels(4) < levels(9) && levels(9) < levels(13) && levels(19) == Some(0.75) && levels(1).is_none());
    assert!(lines[4]["flip_rate"].as_f64().unwrap() > 0.0 && lines[5]["flip_rate"] == 0.0);
    assert!(lines[19]["layers"]["blocks.0.mlp.up"]["kept"].as_f64().unwrap() < 0.6);
    let report = read_json(folder.join("report.json"));
    assert_eq!((report["model"]["zeros"].as_f64(), report["model"]["two_of_four"].as_u64()), (Some(0.75), Some(0)));
    assert_eq!(report["masks"]["blocks.0.mlp.down"]["level"], 0.75);
    // The file has the zeros.
    let reader = twofour::file::Reader::open(folder.join("model.safetensors")).unwrap();
    for name in ["blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"] {
        let values = reader.tensor(name).unwrap().to_vec::<half::bf16>().unwrap();
        let zeros = values.iter().filter(|value| value.to_f32() == 0.0).count();
        assert_eq!(zeros * 4, values.len() * 3, "{name}");
    }
}

#[test]
fn mistakes_of_a_sparsifier_are_told_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let wrong = [
        "sparsity.sparsifier.kind=weight-norn",
        "sparsity.sparsifier.levle=0.5",
        "sparsity.sparsifier.schedule=cubik",
        "sparsity.layers=['blocks.*.mpl.*']",
    ];
    let message = train(directory.path(), "sparsifier", "run", &wrong).bad(2);
    for words in [
        "did you mean `weight-norm`?",
        "did you mean `level`?",
        "did you mean `cubic`?",
        "\"blocks.*.mlp.up\"",
        "mistakes",
    ] {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert!(!directory.path().join("run").exists());
}
