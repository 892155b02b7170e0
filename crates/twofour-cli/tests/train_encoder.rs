//! `train` on encoders: from a checkpoint to one that answers questions or fills in masked tokens, pruned and
//! fine-tuned, and what the other commands do with it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::support::{
    names, read_json, run,
    training::{expect_killed_runs_end_alike, train},
};
use serde_json::{Value, json};
use twofour::file::Reader;

const RECIPE: &str = "\
[model]
kind = 'bert'
task = 'answers'
from = 'bert'
context = 36
[data]
questions = 'train.json'
validation = 0.25
[training]
steps = 12
batch = 4
learning_rate = 3e-3
final_learning_rate = 3e-4
warm_up = 2
validate_every = 6
validation_sequences = 4
checkpoint_every = 4
";

const CONTEXT: &str = "a mask says which two. two of every four weights are zero, the other two are kept";

fn questions(count: usize, start: usize) -> Value {
    let paragraph = |index: usize| {
        json!({"context": CONTEXT, "qas": [{"id": index.to_string(), "question": "the mask says what",
        "answers": [{"text": "which two", "answer_start": start}]}]})
    };
    json!({"version": "1.1", "data": [{"title": "t", "paragraphs": (0..count).map(paragraph).collect::<Vec<_>>()}]})
}

/// A folder with a tiny random BERT, whose tokenizer frames texts and has a mask, a recipe, questions and a text.
fn folder() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let fixture = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../twofour-nn/tests/fixtures/checkpoints/bert");
    fs::create_dir(at.join("bert")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(fixture.join(name), at.join("bert").join(name)).unwrap();
    }
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(fixture.join("tokenizer.json")).unwrap()).unwrap();
    let special = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    tokenizer["post_processor"]["single"] = json!([special("<begin>"), text, special("<end>")]);
    let token = |name: &str, id: u32| json!({"id": name, "ids": [id], "tokens": [name]});
    tokenizer["post_processor"]["special_tokens"] = json!({"<begin>": token("<begin>", 1), "<end>": token("<end>", 0)});
    // The last merge makes way for the mask.
    let model = tokenizer["model"].as_object_mut().unwrap();
    model["merges"].as_array_mut().unwrap().pop();
    let vocabulary = model["vocab"].as_object_mut().unwrap();
    let last = vocabulary.remove("ow").unwrap();
    vocabulary.insert("[MASK]".to_owned(), last.clone());
    tokenizer["added_tokens"]
        .as_array_mut()
        .unwrap()
        .push(json!({"id": last, "content": "[MASK]", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": true}));
    fs::write(at.join("bert/tokenizer.json"), tokenizer.to_string()).unwrap();
    let start = CONTEXT.find("which two").unwrap();
    fs::write(at.join("train.json"), questions(12, start).to_string()).unwrap();
    fs::write(at.join("text.txt"), format!("{CONTEXT}. ").repeat(40)).unwrap();
    fs::write(at.join("recipe.toml"), RECIPE).unwrap();
    directory
}

fn losses(at: &Path, run: &str) -> Vec<f64> {
    let lines = fs::read_to_string(at.join(run).join("metrics.jsonl")).unwrap();
    lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
}

fn score(at: &Path, model: &str) -> Value {
    let mut found = run(at, &["eval", model, "--task", "train.json", "--json"]).good().json();
    found.as_object_mut().unwrap().remove("seconds");
    found
}

#[test]
fn an_encoder_is_fine_tuned_pruned_fine_tuned_again_and_compressed() {
    let directory = folder();
    let at = directory.path();
    // Without a head there are no answers.
    assert!(run(at, &["eval", "bert", "--task", "train.json"]).bad(1).contains("qa_outputs"));
    let ran = train(at, "dense", &["training.steps=80"]).good();
    assert!(ran.stdout.contains("an end of an answer") && ran.stdout.contains("as transformers loads it"), "{ran:?}");
    let all = losses(at, "dense");
    assert!(all[79] < 0.5 * all[0], "{all:?}");
    assert_eq!(names(&at.join("dense/model")), ["config.json", "model.safetensors", "tokenizer.json"]);
    let config = read_json(at.join("dense/model/config.json"));
    assert_eq!(config["architectures"], json!(["BertForQuestionAnswering"]));
    let reader = Reader::open(at.join("dense/model")).unwrap();
    let stored: Vec<String> = reader.tensors().map(|tensor| tensor.name.clone()).collect();
    assert!(stored.iter().all(|name| name.starts_with("bert.") || name.starts_with("qa_outputs.")), "{stored:?}");
    assert!(stored.contains(&"qa_outputs.bias".to_owned()) && !stored.iter().any(|name| name.contains("pooler")));
    let dense = score(at, "dense");
    assert_eq!((&dense, dense["questions"].as_u64()), (&score(at, "dense/model"), Some(12)));
    assert!(dense["f1"].as_f64().unwrap() > 50.0, "{dense}");

    // The head is not pruned.
    run(at, &["prune", "dense/model", "-o", "pruned"]).good();
    let ran = train(at, "tuned", &["model.from=pruned", "sparsity.method=fixed"]).good();
    let report = read_json(at.join("tuned/report.json"));
    assert_eq!(
        (&report["model"]["two_of_four"], &report["target"]),
        (&8.into(), &"an end of an answer".into()),
        "{ran:?}"
    );
    run(at, &["check", "tuned/model"]).good();
    let of = |folder: &str, name: &str| {
        Reader::open(at.join(folder)).unwrap().tensor(name).unwrap().to_vec::<f32>().unwrap()
    };
    let name = "bert.encoder.layer.1.attention.self.key.weight";
    let (before, after) = (of("pruned", name), of("tuned/model", name));
    assert!(before.iter().zip(&after).all(|(before, after)| *before != 0.0 || *after == 0.0), "its zeros stay");
    assert_ne!(before, after);
    // A head that is stored is where training goes on.
    assert!(losses(at, "tuned")[0] < 0.9 * all[0]);

    run(at, &["compress", "tuned/model", "-o", "compressed"]).good();
    run(at, &["quantize", "tuned/model", "-o", "int8", "--dtype", "int8"]).good();
    let [tuned, compressed] = ["tuned", "compressed"].map(|model| score(at, model));
    assert_eq!((&tuned["f1"], &tuned["exact_match"]), (&compressed["f1"], &compressed["exact_match"]));
    score(at, "int8");
}

#[test]
fn an_encoder_learns_masked_tokens_and_its_head_is_kept() {
    let directory = folder();
    let at = directory.path();
    let sets = ["model.task=masked-tokens", "data.text=text.txt", "training.steps=60", "sparsity.method=ste"];
    fs::write(at.join("recipe.toml"), RECIPE.replace("questions = 'train.json'\n", "")).unwrap();
    let ran = train(at, "masked", &sets).good();
    assert!(ran.stdout.contains("a masked token"), "{ran:?}");
    let all = losses(at, "masked");
    assert!(all[59] < 0.8 * all[0], "{all:?}");
    let config = read_json(at.join("masked/model/config.json"));
    assert_eq!(config["architectures"], json!(["BertForMaskedLM"]));
    let reader = Reader::open(at.join("masked/model")).unwrap();
    assert!(reader.tensors().any(|tensor| tensor.name == "cls.predictions.transform.dense.weight"));
    run(at, &["check", "masked/model", "--include", "*intermediate*"]).good();
    let goes_on = ["model.from=masked", sets[0], sets[1]];
    train(at, "more", &goes_on).good();
    assert!(losses(at, "more")[0] < 0.9 * all[0], "the head is that of the model");
    // Again: the text is not encoded a second time.
    assert!(!train(at, "more", &goes_on).good().stdout.contains("Encoding"));
}

#[test]
fn the_checkpoints_of_a_run_are_encoders() {
    let directory = folder();
    let at = directory.path();
    train(at, "answers", &["sparsity.method=ste"]).good();
    let last = score(at, "answers/last");
    assert_eq!(last["f1"], score(at, "answers")["f1"]);
    // As of a run that is not finished: there is no model yet.
    fs::rename(at.join("answers/model"), at.join("elsewhere")).unwrap();
    assert_eq!(score(at, "answers/last"), last);
    train(at, "more", &["model.from=answers/best"]).good();
    assert!(at.join("more/model/config.json").is_file());
    fs::write(at.join("recipe.toml"), RECIPE.replace("questions = 'train.json'\n", "")).unwrap();
    train(at, "masked", &["model.task=masked-tokens", "data.text=text.txt", "sparsity.method=ste"]).good();
    let perplexity = |model: &str| {
        let eval = ["eval", model, "--text", "text.txt", "--dtype", "f32", "--json"];
        run(at, &eval).good().json()["perplexity"].as_f64().unwrap()
    };
    let [checkpoint, model] = ["masked/last", "masked"].map(perplexity);
    assert!((checkpoint / model - 1.0).abs() < 0.02, "{checkpoint} and {model}");
}

#[test]
fn a_killed_run_of_an_encoder_ends_as_if_undisturbed() {
    let directory = folder();
    let at = directory.path();
    let sets = ["training.steps=200", "training.checkpoint_every=3"];
    let files = ["model/model.safetensors", "last/checkpoint.safetensors"];
    expect_killed_runs_end_alike(at, &sets, &[0, 30, 10], &files);
}

#[test]
fn mistakes_of_an_encoders_recipe_are_told_at_once() {
    let directory = folder();
    let at = directory.path();
    let bad = |sets: &[&str]| train(at, "run", sets).bad(2);
    for (set, words) in [
        ("model.task=answer", "did you mean `answers`?"),
        ("model.kind=brt", "did you mean `bert`?"),
        ("model.kind=llama", "bert is a \"bert\""),
        ("model.layers=3", "found 3, but bert has 2"),
        ("model.context=64", "positions for 40 tokens"),
        ("model.context=9", "long enough"),
        ("model.patch=4", "only a \"vit\""),
        ("model.kv_heads=2", "only a \"llama\""),
        ("model.from=absent", "absent"),
        ("data.text=text.txt", "learns from data.questions"),
        ("data.question=train.json", "did you mean `questions`?"),
        ("data.questions=[]", "at least one file"),
        ("data.questions=absent.json", "absent.json"),
        ("data.questions=text.txt", "SQuAD"),
        ("data.tokenizer=bytes", "checkpoint's tokenizer"),
        ("sparsity.method=activation", "squared ReLU"),
        ("sparsity.method=fixed", "no linear layer is 2:4"),
    ] {
        let message = bad(&[set]);
        assert!(message.contains(words), "{set}: {message}");
    }
    let both = bad(&["model.task=answer", "training.steps=0", "model.widht=3"]);
    assert!(both.contains("3 mistakes"), "{both}");
    // An answer that is not where it is said to be, and too few texts for two parts.
    fs::write(at.join("moved.json"), questions(3, 4).to_string()).unwrap();
    assert!(bad(&["data.questions=moved.json"]).contains("not at character 4"));
    fs::write(at.join("one.json"), questions(1, CONTEXT.find("which two").unwrap()).to_string()).unwrap();
    assert!(bad(&["data.questions=one.json"]).contains("0 for training"));
    fs::write(at.join("empty.json"), "").unwrap();
    assert!(bad(&["data.questions=empty.json"]).contains("empty.json"));
    // Without a checkpoint, and keys of an encoder in a recipe of another model.
    fs::write(at.join("recipe.toml"), RECIPE.replace("from = 'bert'\n", "")).unwrap();
    assert!(bad(&[]).contains("model.from: is missing"));
    fs::write(at.join("recipe.toml"), RECIPE.replace("task = 'answers'\n", "")).unwrap();
    assert!(bad(&[]).contains("model.task: is missing"));
    fs::write(
        at.join("gpt.toml"),
        "[model]\nlayers = 1\nwidth = 8\nheads = 2\ncontext = 8\n[data]\ntext = 'text.txt'\n",
    )
    .unwrap();
    for set in ["model.task=answers", "data.questions=train.json"] {
        let message = run(at, &["train", "gpt.toml", "-o", "run", "--set", set]).bad(2);
        assert!(message.contains("only a \"bert\""), "{set}: {message}");
    }
    assert!(!names(at).contains(&"run".to_owned()));
}

#[test]
fn a_dry_run_of_an_encoder_shows_its_layers() {
    let directory = folder();
    let at = directory.path();
    let plan = run(at, &["train", "recipe.toml", "--dry-run", "--set", "sparsity.method=ste", "--json"]).good().json();
    assert_eq!(
        (&plan["step_tokens"], &plan["vocabulary"], &plan["tokenizer"]),
        (&144.into(), &80.into(), &"checkpoint".into())
    );
    let layers = plan["layers"].as_array().unwrap();
    assert_eq!((layers.len(), &layers[8]["name"], &layers[8]["sparse"]), (9, &"answers".into(), &false.into()));
    assert_eq!(layers.iter().filter(|layer| layer["sparse"] == true).count(), 4);
}

#[test]
fn the_repositorys_recipes_of_encoders_train() {
    let directory = folder();
    let at = directory.path();
    for (name, data) in [("questions", "data.questions=train.json"), ("masked-tokens", "data.text=text.txt")] {
        let recipe = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{name}.toml"));
        let recipe = recipe.display().to_string();
        let mut arguments = vec!["train", &recipe, "-o", name];
        for set in ["model.from=bert", "model.context=36", "training.steps=3", "training.warm_up=1", data] {
            arguments.extend(["--set", set]);
        }
        run(at, &arguments).good();
        assert!(at.join(name).join("model/config.json").is_file());
    }
}
