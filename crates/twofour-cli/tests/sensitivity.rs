//! `sensitivity`, plans that `prune` takes, and calibration on text that the model writes.

use std::{fs, path::Path};

use crate::support::{self, checkpoint, read_json, run};
use serde_json::{Value, json};

/// A folder with a text to calibrate on, and one to measure.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let words = "two of every four weights are zero and the other two are kept, a mask says which two. ";
    fs::write(folder.path().join("text"), words.repeat(4)).unwrap();
    fs::write(folder.path().join("other"), "the rows of a weight are cut into groups of four. ".repeat(2)).unwrap();
    folder
}

const CALIBRATION: [&str; 6] = ["--calibration", "text", "--samples", "6", "--length", "24"];

fn sensitivity(at: &Path, model: &str, more: &[&str]) -> support::Ran {
    run(at, &[&["sensitivity", model][..], &CALIBRATION, more].concat())
}

#[test]
fn errors_and_perplexities_are_those_of_pruning_one_layer() {
    let folder = folder();
    let at = folder.path();
    for family in ["llama", "gpt2"] {
        let model = checkpoint(family);
        let more = ["--perplexity", "other", "--picture", "layers.svg", "--force", "--json"];
        let found = sensitivity(at, &model, &more).good().json();
        assert_eq!(found["calibration_tokens"], 6 * 24);
        assert_eq!(found["methods"], json!(["magnitude", "wanda", "sparsegpt", "alps+refit"]));
        let layers = found["layers"].as_array().unwrap();
        assert_eq!(layers.len(), if family == "llama" { 14 } else { 8 });
        let sum = |method: &str| layers.iter().map(|layer| layer["errors"][method].as_f64().unwrap()).sum::<f64>();
        assert!(sum("alps+refit") < sum("sparsegpt") && sum("sparsegpt") < sum("magnitude"), "{found}");
        assert!(fs::read_to_string(at.join("layers.svg")).unwrap().contains("alps+refit"));
        for layer in [&layers[0], &layers[layers.len() - 1]] {
            let name = layer["name"].as_str().unwrap();
            for (method, key) in [("wanda", "wanda"), ("alps", "alps+refit")] {
                let refit = if key.ends_with("refit") { "10" } else { "off" };
                let more = ["--method", method, "--refit", refit, "--tune", "0", "--permute", "off", "--json"];
                let prune = ["prune", &model, "-o", family, "--force", "--include", name, "--eval", "other"];
                let pruned = run(at, &[&prune[..], &CALIBRATION, &more].concat()).good().json();
                let tensors = pruned["tensors"].as_array().unwrap();
                let error = tensors.iter().find(|t| t["name"] == name).unwrap()["relative_error"].as_f64().unwrap();
                let own = layer["errors"][key].as_f64().unwrap();
                assert!((own / error - 1.0).abs() < 1e-3, "{name}, {method}: {own}, {error}");
                if key == "alps+refit" {
                    assert_eq!(pruned["perplexity"]["tokens"], found["perplexity"]["tokens"]);
                    let after = pruned["perplexity"]["after"].as_f64().unwrap();
                    let own = layer["perplexity"].as_f64().unwrap();
                    assert!((own / after - 1.0).abs() < 1e-3, "{name}: {own}, {after}");
                }
            }
        }
    }
}

#[test]
fn a_plan_says_what_prune_prunes() {
    let folder = folder();
    let at = folder.path();
    let model = checkpoint("llama");
    let made = sensitivity(at, &model, &["--methods", "wanda", "--budget", "sparse=0.4", "-o", "plan.json"]).good();
    assert!(made.stdout.contains("plan: ") && made.stdout.contains("--plan plan.json"), "{made:?}");
    let plan = read_json(at.join("plan.json"));
    let sparse = plan["sparse"].as_array().unwrap();
    assert!(!sparse.is_empty() && plan["sparse_share"].as_f64().unwrap() <= 0.4, "{plan}");
    let prune = ["prune", &model, "-o", "pruned", "--method", "wanda", "--plan", "plan.json", "--json"];
    let pruned = run(at, &[&prune[..], &CALIBRATION].concat()).good().json();
    let tensors = pruned["tensors"].as_array().unwrap();
    let names: Vec<&Value> = tensors.iter().filter(|t| t["pruned"] == true).map(|t| &t["name"]).collect();
    assert!(names.len() == sparse.len() && sparse.iter().all(|name| names.contains(&name)), "{names:?}, {plan}");
    let reason = tensors.iter().find(|t| t["name"] == plan["dense"][0]).unwrap()["reason"].as_str().unwrap();
    assert!(reason.contains("--plan"), "{reason}");

    // Budgets of bytes and of perplexity.
    let of = |budget: &str, more: &[&str]| {
        let all = [&["--methods", "wanda", "--json", "--budget", budget][..], more].concat();
        sensitivity(at, &model, &all)
    };
    let all = of("sparse=1", &[]).good().json()["plan"].clone();
    let least = all["bytes"].as_u64().unwrap();
    let some = of(&format!("bytes={}", least + 300), &[]).good().json()["plan"].clone();
    assert!(some["bytes"].as_u64().unwrap() <= least + 300 && some["dense"] != json!([]), "{some}");
    assert!(of(&format!("bytes={}", least - 1), &[]).bad(2).contains("all of the chosen layers pruned"));
    let other = ["--perplexity", "other", "--tokens", "30"];
    let judged = of("perplexity=1.02x", &other).good().json();
    let factor = judged["plan"]["perplexity_factor"].as_f64().unwrap();
    assert!((1.0..=1.02).contains(&factor), "{judged}");

    // What is wrong.
    assert!(of("perplexity=1.02x", &[]).bad(2).contains("--perplexity"));
    assert!(of("layers=3", &[]).bad(2).contains("sparse=SHARE"));
    assert!(sensitivity(at, &model, &["--methods", "best"]).bad(2).contains("sparsegpt"));
    assert!(sensitivity(at, &model, &["--budget", "sparse=0.4", "-o", "plan.json"]).bad(2).contains("exists"));
    let bert = checkpoint("bert");
    assert!(sensitivity(at, &bert, &["--methods", "wanda"]).good().stdout.contains("wanda"));
    assert!(sensitivity(at, &bert, &["--perplexity", "other"]).bad(1).contains("bert"));
    let refused = |plan: &str| {
        fs::write(at.join("wrong.json"), plan).unwrap();
        run(at, &["prune", &model, "-o", "none", "--plan", "wrong.json"])
    };
    assert!(refused("[1]").bad(1).contains("wrong.json"));
    let plan = |names: Value| json!({"sparse": names, "dense": [], "sparse_share": 1.0, "bytes": 1}).to_string();
    assert!(refused(&plan(json!([]))).bad(1).contains("no weight"));
    assert!(refused(&plan(json!(["nowhere.weight"]))).bad(2).contains("nowhere.weight"));
    assert!(!at.join("none").exists());
}

#[test]
fn a_model_is_calibrated_on_what_it_writes() {
    let folder = folder();
    let at = folder.path();
    let model = checkpoint("llama");
    let pruned = |output: &str, seed: &str| {
        let own = ["--calibration", "self", "--samples", "5", "--length", "20", "--method", "sparsegpt"];
        let all = [&["prune", &model, "-o", output, "--seed", seed, "--json"][..], &own].concat();
        let found = run(at, &all).good().json();
        let error = |t: &Value| t["relative_error"].as_f64();
        found["tensors"].as_array().unwrap().iter().filter_map(error).sum::<f64>()
    };
    let both = ["prune", &model, "-o", "none", "--calibration", "self", "--calibration", "text.txt"];
    assert!(run(at, &both).bad(2).contains("stands alone"));
    let error = pruned("one", "0");
    assert!(error > 0.0 && error == pruned("again", "0") && error != pruned("other-seed", "1"));
    let bytes = |output: &str| fs::read(at.join(output).join("model-00001-of-00003.safetensors")).unwrap();
    assert_eq!(bytes("one"), bytes("again"));
    let own = |model: &str, length: &str| {
        run(at, &["prune", model, "-o", "none", "--calibration", "self", "--samples", "2", "--length", length])
    };
    assert!(own(&checkpoint("bert"), "20").bad(2).contains("an encoder writes no text"));
    assert!(own(&model, "1").bad(2).contains("--length 1"));
    assert!(own(&model, "41").bad(2).contains("40 tokens"));
    // A chat's beginning counts as the prompt.
    let copied = at.join("chat");
    fs::create_dir(&copied).unwrap();
    for entry in fs::read_dir(&model).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copied.join(entry.file_name())).unwrap();
    }
    let template = "{{ bos_token }}the two {% for m in messages %}{{ m.content }}{% endfor %}";
    let settings = json!({"bos_token": "<begin>", "chat_template": template});
    fs::write(copied.join("tokenizer_config.json"), settings.to_string()).unwrap();
    assert!(own("chat", "4").bad(2).contains("the model writes after"));
    own("chat", "30").good();
}
