//! `eval` and `generate` on checkpoints, against what transformers computes with them.

use std::{fs, path::PathBuf};

use crate::support::{self, fixture, run};

fn read_json(path: PathBuf) -> serde_json::Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn perplexity_and_greedy_text_are_those_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    for family in ["llama", "mistral", "qwen2", "qwen3", "gpt2"] {
        let (model, text) = (fixture(family), dir.path().join(family));
        let model = model.to_str().unwrap();
        let expected = read_json(fixture(family).join("expected.json"));
        fs::write(&text, expected["text"].as_str().unwrap()).unwrap();
        for expected in expected["perplexity"].as_array().unwrap() {
            let [window, stride] = ["window", "stride"].map(|name| expected[name].to_string());
            let arguments = ["eval", model, "--text", family, "--window", &window, "--stride", &stride];
            let found = run(dir.path(), &[&arguments[..], &["--dtype", "f32", "--json"]].concat()).good().json();
            assert_eq!(found["tokens"], expected["tokens"], "{family}");
            let ratio = found["perplexity"].as_f64().unwrap() / expected["perplexity"].as_f64().unwrap();
            assert!((ratio - 1.0).abs() < 1e-3, "{family}: {ratio}");
            let people = run(dir.path(), &arguments).good().stdout;
            assert!(people.contains("perplexity") && people.contains(&expected["tokens"].to_string()), "{people}");
        }
        let greedy = expected["greedy"].as_array().unwrap();
        let count = greedy.len().to_string();
        let prompt = expected["prompt"].as_str().unwrap();
        let arguments = ["generate", model, "--prompt", prompt, "--temperature", "0", "--length", &count];
        let found = run(dir.path(), &[&arguments[..], &["--dtype", "f32", "--json"]].concat()).good().json();
        // The model ends its text with token 0 where transformers was told to go on.
        let until = greedy.iter().position(|token| *token == 0).unwrap_or(greedy.len());
        assert_eq!(found["token_ids"].as_array().unwrap()[..], greedy[..until], "{family}");
        assert_eq!(found["tokens"], until);
        assert!(found["tokens_per_s"].as_f64().unwrap() > 0.0);
        if until == greedy.len() {
            assert_eq!(found["text"], expected["greedy_text"], "{family}");
        }
    }
}

#[test]
fn windows_and_texts_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("llama");
    fs::write(dir.path().join("text"), "two of every four").unwrap();
    fs::write(dir.path().join("short"), "").unwrap();
    fs::write(dir.path().join("bytes"), [0xFF, 0xFE]).unwrap();
    for (text, more, code, word) in [
        ("text", &["--window", "41"][..], 2, "window"),
        ("text", &["--window", "8", "--stride", "9"], 2, "stride"),
        ("text", &["--window", "8", "--stride", "0"], 2, "stride"),
        ("short", &[], 1, "short: the text is empty"),
        ("bytes", &[], 1, "UTF-8"),
        ("absent", &[], 1, "absent"),
    ] {
        let arguments = [&["eval", model.to_str().unwrap(), "--text", text], more].concat();
        let message = run(dir.path(), &arguments).bad(code);
        assert!(message.contains(word), "{text} {more:?}: {message}");
    }
}

#[test]
fn a_damaged_checkpoint_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), r#"{"model_type": "mamba"}"#).unwrap();
    fs::write(dir.path().join("text"), "two of every four").unwrap();
    for command in [&["generate", "."][..], &["eval", ".", "--text", "text"]] {
        let message = run(dir.path(), command).bad(1);
        assert!(message.contains("mamba") && message.contains("config.json"), "{message}");
    }
}

/// What a damaged model computes is no number, and no answer.
#[test]
fn scores_that_are_not_finite_and_a_configuration_that_makes_them_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text"), "two of every four").unwrap();
    let copy = |name: &str| {
        support::copy(fixture("llama"), at.join(name));
        at.join(name)
    };
    let eval = |model: &str| run(at, &["eval", model, "--text", "text", "--json"]).bad(1);

    let shard = copy("nan").join("model-00003-of-00003.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&shard, bytes).unwrap();
    assert!(eval("nan").contains("perplexity: the model's scores of tokens are NaN"));
    for temperature in ["0", "0.8"] {
        let generate = ["generate", "nan", "--prompt", "two", "--temperature", temperature, "--json"];
        assert!(run(at, &generate).bad(1).contains("the next token: the model's scores of tokens are NaN"));
    }

    let config = copy("config").join("config.json");
    let sound = fs::read_to_string(&config).unwrap();
    for (field, from, to) in [
        ("rms_norm_eps", "\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": -1"),
        ("rope_parameters.rope_theta", "\"rope_theta\": 500.0", "\"rope_theta\": 0"),
        ("heads", "\"num_attention_heads\": 4", "\"num_attention_heads\": 0"),
    ] {
        assert!(sound.contains(from), "{from}");
        fs::write(&config, sound.replace(from, to)).unwrap();
        let message = eval("config");
        assert!(message.contains(field) && message.contains("config.json"), "{message}");
    }
}

#[test]
fn a_device_that_is_not_there_or_several_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("text"), "two of every four").unwrap();
    let model = fixture("llama");
    let eval = ["eval", model.to_str().unwrap(), "--text", "text", "--device"];
    for (device, code, word) in [("cuda:99", 1, ""), ("cuda:0,1", 2, "one GPU"), ("gpu", 2, "not a device")] {
        let message = run(dir.path(), &[&eval[..], &[device]].concat()).bad(code);
        assert!(message.contains(word), "{device}: {message}");
    }
    let answer = run(dir.path(), &[&eval[..], &["cpu", "--window", "4", "--json"]].concat()).good().json();
    assert_eq!(answer["device"], "cpu");
}
