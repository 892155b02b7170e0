//! Help, completions, man pages and `advise`: what a person at a shell meets first.

use crate::support::{self, model, names, run, twofour};

#[test]
fn every_command_has_help_with_examples() {
    let dir = tempfile::tempdir().unwrap();
    let help = run(dir.path(), &["--help"]).good().stdout;
    let commands: Vec<&str> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    assert!(commands.len() >= 7 && commands.contains(&"prune"), "{commands:?}");
    for command in commands {
        let help = run(dir.path(), &[command, "--help"]).good().stdout;
        assert!(help.contains(&format!("twofour {command}")) && help.contains("Example"), "{command}: {help}");
    }
}

#[test]
fn completions_and_man_pages_know_the_commands() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        assert!(run(dir.path(), &["completions", shell]).good().stdout.contains("transposable"), "{shell}");
    }
    run(dir.path(), &["man", "pages"]).good();
    let pages = names(&dir.path().join("pages"));
    assert!(pages.contains(&"twofour.1".to_owned()) && pages.contains(&"twofour-check.1".to_owned()), "{pages:?}");
}

#[test]
fn advise_measures_shapes_and_models() {
    let (dir, _) = model();
    let quick = ["--tokens", "1,4", "--budget", "0.01", "--json"];
    let ran = run(dir.path(), &[&["advise", "--shape", "64x128", "--threads", "1"], &quick[..]].concat()).good();
    let answer = ran.json();
    assert_eq!(answer["machine"]["threads"], 1);
    let shape = &answer["shapes"][0];
    assert_eq!((&shape["out"], &shape["in"]), (&64.into(), &128.into()));
    let timing = &shape["timings"][1];
    assert_eq!(
        (&timing["tokens"], &timing["dense_bytes"], &timing["sparse_bytes"]),
        (&4.into(), &16384.into(), &9216.into())
    );
    let interval = &timing["interval"];
    let [low, high] = ["low", "high"].map(|end| interval[end].as_f64().unwrap());
    assert!(0.0 < low && low <= high && timing["passes"].as_u64() >= Some(3), "{timing}");
    match timing["verdict"].as_str().unwrap() {
        "too_noisy" => assert!(timing["speed_up"].is_null(), "{timing}"),
        _ => assert!(timing["speed_up"].as_f64().unwrap() > 0.0, "{timing}"),
    }
    // At one token nothing above the bandwidth limit is reported, however noisy the machine.
    let one = &shape["timings"][0];
    assert!(one["interval"]["high"].as_f64().unwrap() <= one["bandwidth_limit"].as_f64().unwrap(), "{one}");

    // Of one token the limit of the machine is not measured.
    let of_model = ["advise", "model.safetensors", "--dtype", "f32", "--tokens", "1", "--budget", "0.01", "--json"];
    assert_eq!(run(dir.path(), &of_model).good().json()["shapes"].as_array().unwrap().len(), 2);
    // A number that is given twice is measured once.
    let text = run(dir.path(), &["advise", "--shape", "64x128", "--tokens", "1,1", "--budget", "0.01"]).good().stdout;
    assert!(text.contains("64x128") && text.contains("1 token"), "{text}");
}

#[test]
fn colours_obey() {
    let (dir, _) = model();
    let painted = run(dir.path(), &["check", "model.safetensors", "--color", "always"]).stdout;
    assert!(painted.contains("\x1b["), "{painted}");
    assert!(!run(dir.path(), &["check", "model.safetensors"]).stdout.contains("\x1b["));
}

#[test]
fn an_unknown_engine_is_named_with_those_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let output = twofour()
        .args(["advise", "--shape", "64x64"])
        .env("TWOFOUR_ENGINE", "warp")
        .current_dir(dir.path())
        .output()
        .unwrap();
    let message = support::Ran::from(output).bad(1);
    assert!(message.contains("`warp`") && message.contains("scalar"), "{message}");
}
