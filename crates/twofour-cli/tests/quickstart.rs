//! `quickstart` and `generate`, end to end with a model so small that a step takes about a millisecond: the plan is
//! written beforehand, as an interrupted run leaves it.

use std::{
    fs,
    path::Path,
    process::{Child, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use crate::support::{Ran, names, run, training::tiny_quickstart, twofour};
use serde_json::{Value, json};

fn start(directory: &Path) -> Child {
    let mut command = twofour();
    command.args(["quickstart", "--out", "q"]).current_dir(directory);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn wait_for(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(60), "waited in vain for {what}");
        sleep(Duration::from_millis(10));
    }
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_run_leaves_a_report_a_picture_and_models_that_write() {
    let dir = tempfile::tempdir().unwrap();
    let q = dir.path().join("q");
    tiny_quickstart(&q, 0.05, 60);
    let ran = run(dir.path(), &["quickstart", "--out", "q"]).good();
    assert!(ran.stdout.contains("of the size") && ran.stdout.contains("decode in f32"), "{}", ran.stdout);
    let left = ["dense", "dense.safetensors", "losses.json", "plan.json", "report.json", "report.svg", "sparse"];
    assert_eq!(names(&q), [left.as_slice(), &["sparse.safetensors", "text"]].concat());

    let report = read_json(&q.join("report.json"));
    for side in ["dense", "sparse"] {
        for key in ["val_loss", "weight_bytes", "decode_tokens_per_s", "prefill_tokens_per_s"] {
            assert!(report[side][key].as_f64().unwrap() > 0.0, "{side}.{key}");
        }
        let losses = read_json(&q.join("losses.json"));
        assert_eq!(losses[side].as_array().unwrap().len() as u64, report["steps"].as_u64().unwrap());
        // ln 256 is what a model that knows nothing has.
        assert!(report[side]["val_loss"].as_f64().unwrap() < 4.5, "{report}");
    }
    let bytes = |side: &str| report[side]["weight_bytes"].as_u64().unwrap();
    assert_eq!(bytes("sparse") * 16, bytes("dense") * 9);
    assert_eq!(bytes("dense"), 2 * (96 * 32 + 32 * 32 + 2 * 64 * 32));
    assert!(report["machine"]["cpu"].is_string() && report["config"]["model"]["width"] == 32);
    assert!(report["seconds"].as_f64().unwrap() > 0.0);
    let svg = fs::read_to_string(q.join("report.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>") && svg.contains("polyline"), "{svg}");

    // Again: the same report, nothing trained. Asked for something else: refused.
    let again = run(dir.path(), &["quickstart", "--out", "q", "--json"]).good();
    assert_eq!(again.json(), report);
    for option in [["--seed", "7"], ["--minutes", "5"]] {
        let asked = run(dir.path(), &[&["quickstart", "--out", "q"], &option[..]].concat()).bad(2);
        assert!(asked.contains("--minutes 0.05 --seed 0") && asked.contains("--force"), "{asked}");
    }
    run(dir.path(), &["quickstart", "--out", "q", "--minutes", "0.05", "--seed", "0"]).good();
    run(dir.path(), &["check", "q/sparse.safetensors"]).good();

    let text = |model: &str, seed: &str| {
        let arguments = ["generate", model, "--prompt", "let ", "--tokens", "40", "--temperature", "1", "--seed", seed];
        run(dir.path(), &[&arguments[..], &["--json"]].concat()).good().json()["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(text("q", "1"), text("q/sparse.safetensors", "1"));
    assert_ne!(text("q", "1"), text("q", "2"));
    // Dense, pruned, and pruned and compressed, all of them write.
    let exclude = ["--exclude", "embedding.weight", "--exclude", "head.weight"];
    run(dir.path(), &[&["prune", "q/dense.safetensors", "-o", "pruned.safetensors"], &exclude[..]].concat()).good();
    run(dir.path(), &[&["compress", "pruned.safetensors", "-o", "small.safetensors"], &exclude[..]].concat()).good();
    assert!(!text("q/dense.safetensors", "1").is_empty());
    let arguments = |model| ["generate", model, "--tokens", "20", "--temperature", "0"];
    let [pruned, small] = ["pruned.safetensors", "small.safetensors"].map(|m| run(dir.path(), &arguments(m)).good());
    // The same weights in the same precision; sums may be taken in another order, so only the first bytes must agree.
    assert_eq!(pruned.stdout.as_bytes()[..2], small.stdout.as_bytes()[..2]);
    assert!(run(dir.path(), &["generate", "q", "--temperature=-1"]).bad(2).contains("temperature"));
}

#[test]
#[cfg(unix)]
fn an_interrupted_or_killed_run_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let q = dir.path().join("q");
    // More steps than this test lasts.
    tiny_quickstart(&q, 1000.0, 10_000_000);
    let mut steps = 0;
    for _ in 0..2 {
        let child = start(dir.path());
        sleep(Duration::from_millis(1500));
        let pid = child.id().to_string();
        assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
        let ran = Ran::from(child.wait_with_output().unwrap());
        assert_eq!(ran.code, Some(130), "{ran:?}");
        assert!(ran.stderr.contains("run it again with --output q"), "{ran:?}");
        assert_eq!(ran.stdout.contains(&format!("going on from step {steps}\n")), steps > 0, "{ran:?}");
        let done = read_json(&q.join("losses.json"))["sparse"].as_array().unwrap().len();
        assert!(done > steps, "{done} after {steps}");
        steps = done;

        // Killed without warning, also in the middle of what it writes: the checkpoint stays as it was.
        let mut child = start(dir.path());
        sleep(Duration::from_millis(700));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(read_json(&q.join("losses.json"))["dense"].as_array().unwrap().len(), steps);
    }
    // The time that was asked for is over: what is trained is compared.
    let mut losses = read_json(&q.join("losses.json"));
    losses["seconds"] = json!(60_000.0);
    fs::write(q.join("losses.json"), losses.to_string()).unwrap();
    let ran = run(dir.path(), &["quickstart", "--out", "q"]).good();
    assert!(ran.stdout.contains(&format!("stopped at step {steps} of 10000000: the time is up")), "{}", ran.stdout);
    assert_eq!(read_json(&q.join("report.json"))["steps"], json!(steps));
    assert!(!names(&q).iter().any(|name| name.ends_with(".tmp")), "{:?}", names(&q));
}

#[test]
#[cfg(unix)]
fn a_run_killed_before_its_first_checkpoint_begins_anew() {
    let dir = tempfile::tempdir().unwrap();
    let q = dir.path().join("q");
    let mut child = start(dir.path());
    wait_for("the directory", || q.exists());
    child.kill().unwrap();
    child.wait().unwrap();
    // What was being written when it was killed does not make the directory somebody else's.
    fs::write(q.join(".plan.json.tmp"), "{").unwrap();
    assert!(!q.join("report.json").exists());
    tiny_quickstart(&q, 0.02, 8);
    run(dir.path(), &["quickstart", "--out", "q"]).good();
}

#[test]
fn other_directories_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let q = dir.path().join("q");
    fs::create_dir(&q).unwrap();
    fs::write(q.join("thesis.tex"), "precious").unwrap();
    let message = run(dir.path(), &["quickstart", "--out", "q"]).bad(2);
    assert!(message.contains("holds no quickstart") && message.contains("--force"), "{message}");
    assert!(run(dir.path(), &["quickstart", "--out", "q/thesis.tex"]).bad(2).contains("not a directory"));
    assert_eq!(names(&q), ["thesis.tex"]);
    assert_eq!(fs::read(q.join("thesis.tex")).unwrap(), b"precious");
    for minutes in ["0", "-1", "nan", "1e9"] {
        run(dir.path(), &["quickstart", "--out", "new", &format!("--minutes={minutes}")]).bad(2);
    }
    assert!(!dir.path().join("new").exists());
}

#[test]
fn damaged_files_and_other_runs_are_named_with_the_way_out() {
    let dir = tempfile::tempdir().unwrap();
    let q = dir.path().join("q");
    tiny_quickstart(&q, 0.02, 8);
    let asked = run(dir.path(), &["quickstart", "--out", "q", "--minutes", "5"]).bad(2);
    assert!(asked.contains("--minutes 0.02"), "{asked}");
    run(dir.path(), &["quickstart", "--out", "q", "--quiet"]).good();

    let good = fs::read(q.join("report.json")).unwrap();
    for bad in [b"{}".as_slice(), b"\xff\xfe", &good[..good.len() / 2]] {
        fs::write(q.join("report.json"), bad).unwrap();
        let message = run(dir.path(), &["quickstart", "--out", "q"]).bad(1);
        assert!(message.contains("report.json") && message.contains("--force"), "{message}");
    }
    fs::remove_file(q.join("report.json")).unwrap();
    for name in ["losses.json", "plan.json"] {
        let good = fs::read(q.join(name)).unwrap();
        fs::write(q.join(name), "[]").unwrap();
        let message = run(dir.path(), &["quickstart", "--out", "q"]).bad(1);
        assert!(message.contains(name), "{message}");
        fs::write(q.join(name), good).unwrap();
    }
    // A checkpoint of another text.
    let text = fs::read(q.join("text")).unwrap();
    fs::write(q.join("text"), [&text[..], b"more"].concat()).unwrap();
    let ran = run(dir.path(), &["quickstart", "--out", "q"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("other data") && ran.stderr.contains("--force"), "{ran:?}");
    fs::write(q.join("text"), text).unwrap();
    run(dir.path(), &["quickstart", "--out", "q"]).good();
}
