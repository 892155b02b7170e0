//! `train` from a model on disk: checkpoints as transformers writes them, and what `train` left.

use std::{fs, path::Path};

use crate::support::{
    self, checkpoint, copy, names, read_json, run,
    training::{expect_killed_runs_end_alike, train},
};
use serde_json::Value;
use twofour::file::Reader;

const RECIPE: &str = "\
[model]
from = 'pruned'
context = 16
[data]
text = 'text.txt'
[training]
steps = 12
batch = 4
learning_rate = 3e-3
final_learning_rate = 3e-4
warm_up = 2
validate_every = 6
validation_sequences = 4
checkpoint_every = 4
[sparsity]
method = 'fixed'
";

/// A folder with a text, a recipe, and a family's checkpoint pruned by magnitude.
fn folder(family: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    fs::write(at.join("text.txt"), "two of every four weights are zero and the other two are kept. ".repeat(40))
        .unwrap();
    fs::write(at.join("recipe.toml"), RECIPE).unwrap();
    run(at, &["prune", &checkpoint(family), "-o", "pruned"]).good();
    directory
}

/// Names and values of a model's tensors.
fn tensors(path: &Path) -> Vec<(String, Vec<f32>)> {
    let reader = Reader::open(path).unwrap();
    let values = |name: &str| {
        let view = reader.tensor(name).unwrap();
        match view.info.dtype.name() {
            "F16" => view.elements::<half::f16>().unwrap().iter().map(|value| value.to_f32()).collect(),
            "BF16" => view.elements::<half::bf16>().unwrap().iter().map(|value| value.to_f32()).collect(),
            _ => view.to_vec::<f32>().unwrap(),
        }
    };
    let mut all: Vec<_> = reader.tensors().map(|tensor| (tensor.name.clone(), values(&tensor.name))).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// What makes the recipe one of adapters.
fn adapters(kind: &str) -> [String; 3] {
    ["sparsity.method=adapters".to_owned(), format!("sparsity.adapter={kind}"), "sparsity.rank=2".to_owned()]
}

#[test]
fn a_run_of_adapters_leaves_what_merge_makes_of_the_pruned_model_and_the_adapter() {
    for (family, kind) in [("llama", "lors"), ("qwen2", "spp"), ("gpt2", "lora"), ("phi3", "spp")] {
        let directory = folder(family);
        let at = directory.path();
        let sets = adapters(kind);
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let ran = train(at, "run", &sets).good();
        assert!(ran.stdout.contains("run/adapter") && ran.stdout.contains("of the merged model"), "{ran:?}");
        let report = read_json(at.join("run/report.json"));
        let adapter = &report["adapter"];
        assert_eq!((&adapter["kind"], &adapter["path"]), (&kind.into(), &"adapter".into()));
        let losses = adapter["layers"].as_object().unwrap().values().map(|layer| layer["lost"].as_f64().unwrap());
        assert!(losses.clone().count() >= 8, "{family}: {report}");
        assert!(losses.clone().all(|lost| (lost > 0.0) == (kind == "lora")), "{family}: {report}");
        assert_eq!(adapter["merged_val_loss"] == report["val_loss"], kind != "lora", "{family}: {report}");
        run(at, &["check", "run/model"]).good();
        run(at, &["merge", "pruned", "run/adapter", "-o", "merged"]).good();
        let (trained, merged) = (tensors(&at.join("run/model")), tensors(&at.join("merged")));
        assert!(trained == merged, "{family}, {kind}");
        let pruned = tensors(&at.join("pruned"));
        let changed = trained.iter().zip(&pruned).filter(|(a, b)| a != b).count();
        assert!(changed >= 8 && changed < pruned.len(), "{family}: {changed} of {}", pruned.len());
        // Again: nothing is trained, and the report is the same.
        train(at, "run", &sets).good();
        assert_eq!(read_json(at.join("run/report.json")), report);
    }
}

#[test]
fn a_run_of_adapters_that_was_killed_ends_as_one_that_was_not() {
    let directory = folder("llama");
    let sets = adapters("spp");
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let files = ["model/model.safetensors", "adapter/adapter_model.safetensors", "last/checkpoint.safetensors"];
    expect_killed_runs_end_alike(directory.path(), &sets, &[3, 20], &files);
}

#[test]
fn a_model_that_was_trained_in_integers_loses_next_to_nothing_when_it_is_quantized() {
    for family in ["llama", "qwen2", "phi3"] {
        let directory = folder(family);
        let at = directory.path();
        let perplexity = |model: &str| -> f64 {
            let ran = run(at, &["eval", model, "--text", "text.txt", "--window", "16", "--json"]).good();
            serde_json::from_str::<Value>(&ran.stdout).unwrap()["perplexity"].as_f64().unwrap()
        };
        let lost = |method: &str| {
            train(at, method, &[&format!("sparsity.method={method}")]).good();
            let (floats, integers) = (format!("{method}/model"), format!("{method}-int4"));
            run(at, &["check", &floats]).good();
            run(at, &["quantize", &floats, "-o", &integers, "--dtype", "int4", "--group", "128"]).good();
            (perplexity(&integers) / perplexity(&floats) - 1.0).abs()
        };
        let (quantized, fixed) = (lost("quantized"), lost("fixed"));
        // Of a group whose largest integer has become smaller than 7 the scale is another one.
        assert!(quantized < 4e-3 && quantized < 0.2 * fixed, "{family}: {quantized}, {fixed}");
        // The newest checkpoint is the model at the end, which is stored in 16 bits.
        let of_last = perplexity("quantized/last") / perplexity("quantized/model") - 1.0;
        assert!(of_last.abs() < 3e-3, "{family}: {of_last}");
    }
}

#[test]
fn fine_tuning_keeps_the_zeros_of_a_pruned_checkpoint() {
    // The windows of mistral are shorter than the sequences.
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        let directory = folder(family);
        let at = directory.path();
        let ran = train(at, "run", &[]).good();
        assert!(ran.stdout.contains("Encoding") && ran.stdout.contains("as transformers loads it"), "{ran:?}");
        // Every linear layer of the blocks, not only those of feed-forward blocks.
        let report = read_json(at.join("run/report.json"));
        assert_eq!((&report["model"]["two_of_four"], &report["model"]["path"]), (&8.into(), &"model".into()));
        let losses: Vec<f64> = fs::read_to_string(at.join("run/metrics.jsonl"))
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap())
            .collect();
        assert!(losses[11] < losses[0], "{family}: {losses:?}");
        run(at, &["check", "run/model"]).good();
        let (before, after) = (tensors(&at.join("pruned")), tensors(&at.join("run/model")));
        assert_eq!(before.len(), after.len());
        let mut changed = 0;
        for ((name, before), (other, after)) in before.iter().zip(&after) {
            assert_eq!((name, before.len()), (other, after.len()));
            changed += usize::from(before != after);
            if name.contains("_proj.weight") {
                let stay = before.iter().zip(after).all(|(before, after)| *before != 0.0 || *after == 0.0);
                assert!(stay, "{family}: zeros of {name}");
            }
        }
        assert!(changed > before.len() / 2, "{family}: {changed} of {} tensors", before.len());
        for file in ["config.json", "tokenizer.json"] {
            let read = |folder: &str| fs::read(at.join(folder).join(file)).unwrap();
            assert_eq!(read("pruned"), read("run/model"), "{file}");
        }
        // The folder stands for the model in it.
        let eval = |model: &str| run(at, &["eval", model, "--text", "text.txt", "--json"]).good().json();
        assert_eq!(eval("run")["perplexity"], eval("run/model")["perplexity"]);
        assert!(eval("run")["perplexity"].as_f64() < eval("pruned")["perplexity"].as_f64(), "{family}");
        // Again: the text is not encoded a second time, and the report is the same.
        let again = train(at, "run", &[]).good();
        assert!(!again.stdout.contains("Encoding"), "{again:?}");
        assert_eq!(read_json(at.join("run/report.json")), report);
    }
}

#[test]
fn a_killed_fine_tuning_ends_as_if_undisturbed() {
    let directory = folder("llama");
    let at = directory.path();
    let sets = ["training.steps=300", "training.checkpoint_every=3"];
    let files = ["model/model.safetensors", "last/checkpoint.safetensors", "tokens.safetensors"];
    expect_killed_runs_end_alike(at, &sets, &[0, 40, 15], &files);
    assert!(!names(&at.join("killed")).iter().any(|name| name.ends_with(".tmp")), "{:?}", names(&at.join("killed")));
}

#[test]
fn every_recipe_of_a_decoder_starts_from_a_model_of_ones_own() {
    let directory = folder("llama");
    let at = directory.path();
    let mut tried = vec![];
    let recipes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    for path in fs::read_dir(recipes).unwrap().map(|entry| entry.unwrap().path()) {
        let text = fs::read_to_string(&path).unwrap();
        // Encoders and vision transformers have other sizes; two recipes need a second model.
        if !text.contains("\nlayers = ") || ["'vit'", "\"vit\"", "image = "].iter().any(|word| text.contains(word)) {
            continue;
        }
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        // As their errors say, trial runs begin with random weights, and a squared ReLU replaces no gate.
        if ["fst-auto", "activation"].contains(&name.as_str()) {
            continue;
        }
        let pruned = ["fixed", "fine-tune"].contains(&name.as_str());
        let from = if pruned { "model.from=pruned".to_owned() } else { format!("model.from={}", checkpoint("llama")) };
        let path = path.display().to_string();
        // The sizes are the model's; a context is the run's.
        let words = ["train", &path, "--dry-run", "--json", "--set", &from, "--set", "model.context=16"];
        let plan = run(at, &[&words[..], &["--set", "data.text='text.txt'"]].concat()).good().json();
        assert_eq!(plan["parameters"], 6704, "{name}: {plan}");
        // One that is set contradicts the model.
        let bad = run(at, &[&words[..], &["--set", "data.text='text.txt'", "--set", "model.layers=3"]].concat()).bad(2);
        assert!(bad.contains("model.layers: found 3"), "{name}: {bad}");
        tried.push(name);
    }
    for name in ["dense", "one-shot", "ste", "learned-masks", "decoder-25m", "layer-by-layer"] {
        assert!(tried.iter().any(|tried| tried == name), "{name}: {tried:?}");
    }
}

#[test]
fn what_contradicts_the_model_is_told_at_once() {
    let directory = folder("llama");
    let at = directory.path();
    let bad = |sets: &[&str]| train(at, "run", sets).bad(2);
    let sizes = ["model.layers=3", "model.width=16", "model.heads=2", "model.kind=gpt", "model.context=99"];
    let message = bad(&[&sizes[..], &["training.steps=0"]].concat());
    for words in [
        "5 mistakes",
        "model.layers: found 3, but pruned has 2",
        "model.heads: found 2, but pruned has 4",
        "model.kind: found \"gpt\", but pruned is a \"llama\"",
        "model.context: found 99, but that of pruned is 40",
        "training.steps",
    ] {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert!(bad(&["model.from=absent"]).contains("absent"));
    assert!(bad(&["data.tokenizer=byte"]).contains("did you mean `bytes`?"));
    assert!(bad(&["data.tokenizer=bytes"]).contains("256 tokens, but the model has 80"));
    assert!(bad(&["data.tokenizer=other.json"]).contains("other.json"));
    assert!(bad(&["sparsity.begin=0.5"]).contains("from the first step on"));
    assert!(bad(&["sparsity.mask=greedy"]).contains("zeros of the model"));
    assert!(bad(&["sparsity.method=fst", "sparsity.decay=auto"]).contains("random weights"));
    // The dense checkpoint has no zeros to keep.
    let dense = format!("model.from={}", checkpoint("llama"));
    assert!(bad(&[&dense]).contains("no linear layer is 2:4"), "{}", bad(&[&dense]));
    let named = bad(&[&dense, "sparsity.layers=['blocks.*.mlp.*']"]);
    for words in ["\"blocks.0.mlp.up\" (and 3 more) is not 2:4", "gate_proj.weight", "row 0", "twofour prune"] {
        assert!(named.contains(words), "{words}: {named}");
    }
    fs::write(at.join("latin.txt"), b"caf\xe9 ".repeat(100)).unwrap();
    assert!(bad(&["data.text=latin.txt"]).contains("not UTF-8"));
    assert_eq!(names(at), ["latin.txt", "pruned", "recipe.toml", "text.txt"]);
}

#[test]
fn a_dry_run_shows_what_training_starts_from() {
    let directory = folder("llama");
    let at = directory.path();
    let ran = run(at, &["train", "recipe.toml", "--dry-run"]).good();
    for words in ["starts from", "pruned", "80, by checkpoint", "its zeros are kept", "not 2:4 in the model"] {
        assert!(ran.stdout.contains(words), "{words}: {}", ran.stdout);
    }
    let plan = run(at, &["train", "recipe.toml", "--dry-run", "--json"]).good().json();
    assert_eq!((&plan["from"], &plan["vocabulary"]), (&"pruned".into(), &80.into()));
    assert!(!names(at).contains(&"run".to_owned()));
}

const LLAMA: [&str; 8] = [
    "model.kind=llama",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.kv_heads=1",
    "model.feed_forward=24",
    "model.context=16",
    "sparsity.method=ste",
];

/// A recipe without a model to start from.
fn scratch(at: &Path) {
    fs::write(at.join("recipe.toml"), RECIPE.replace("from = 'pruned'\n", "")).unwrap();
}

#[test]
fn a_trained_llama_is_a_checkpoint_that_the_other_commands_take() {
    let directory = folder("llama");
    let at = directory.path();
    scratch(at);
    train(at, "bytes", &LLAMA).good();
    assert_eq!(
        names(&at.join("bytes/model")),
        ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    );
    run(at, &["check", "bytes/model", "--include", "*mlp*"]).good();
    let calibration = ["--calibration", "text.txt", "--samples", "4", "--length", "12"];
    run(at, &[&["prune", "bytes/model", "-o", "wanda", "--method", "wanda"], &calibration[..]].concat()).good();
    let text = run(at, &["generate", "bytes", "--length", "12", "--json"]).good().json();
    assert_eq!(text["tokens"], 12);
    // Fine-tuning of what was pruned; the tokens of its tokenizer are the bytes.
    let fixed = ["model.from=wanda", "sparsity.method=fixed", "data.tokenizer=bytes"];
    train(at, "tuned", &fixed).good();
    let [bytes, checkpoint] = [fixed.as_slice(), &fixed[..2]].map(|sets| {
        let out = format!("tuned-{}", sets.len());
        train(at, &out, sets).good();
        fs::read(at.join(out).join("model/model.safetensors")).unwrap()
    });
    assert!(bytes == checkpoint, "the checkpoint's tokenizer gives other tokens than the bytes");
    // A vocabulary of another tokenizer.
    let tokenizer = format!("data.tokenizer={}", at.join("pruned/tokenizer.json").display());
    train(at, "words", &[&LLAMA[..], &[&tokenizer]].concat()).good();
    let config = read_json(at.join("words/model/config.json"));
    assert_eq!(config["vocab_size"], 80);
    let perplexity = run(at, &["eval", "words", "--text", "text.txt", "--json"]).good().json();
    // A uniform guess has 80.
    assert!(perplexity["perplexity"].as_f64().unwrap() < 120.0, "{perplexity}");
    let gpt = ["model.layers=1", "model.width=16", "model.heads=2", &tokenizer];
    assert!(train(at, "gpt", &gpt).bad(2).contains("over bytes"));
}

#[test]
fn training_goes_on_from_the_folder_of_another_run() {
    let directory = folder("llama");
    let at = directory.path();
    scratch(at);
    let gpt = ["model.layers=1", "model.width=16", "model.heads=2"];
    train(at, "dense", &[&gpt[..], &["sparsity.method=ste"]].concat()).good();
    let ran = train(at, "tuned", &["model.from=dense", "data.text=text.txt"]).good();
    assert!(ran.stdout.contains("its 2:4 layers compressed"), "{ran:?}");
    let inspected = run(at, &["inspect", "tuned/model.safetensors", "--json"]).good().stdout;
    assert!(inspected.contains("2:4"), "{inspected}");
    assert!(train(at, "other", &["model.from=dense", "data.tokenizer=checkpoint"]).bad(2).contains("tokenizer.json"));
}

/// The arguments that make a run of the repository's recipe small enough.
fn recovery(teacher: &str) -> Vec<String> {
    let sets = [
        "model.from=pruned",
        "model.context=16",
        "data.text=text.txt",
        "data.validation=0.2",
        "training.steps=30",
        "training.batch=4",
        "training.learning_rate=3e-3",
        "training.warm_up=2",
        "training.validate_every=15",
        "training.validation_sequences=4",
    ];
    let teacher = format!("distillation.teacher={teacher}");
    sets.iter().map(|set| (*set).to_owned()).chain([teacher]).flat_map(|set| ["--set".to_owned(), set]).collect()
}

fn recover(at: &Path, teacher: &str, more: &[&str]) -> support::Ran {
    train_by("recover", at, teacher, more)
}

fn train_by(recipe: &str, at: &Path, teacher: &str, more: &[&str]) -> support::Ran {
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{recipe}.toml"));
    let recipe = recipe.display().to_string();
    let sets = recovery(teacher);
    let sets = sets.iter().map(String::as_str);
    let more = more.iter().flat_map(|set| ["--set", set]);
    let arguments: Vec<&str> = ["train", &recipe, "-o", "run"].into_iter().chain(sets).chain(more).collect();
    run(at, &arguments)
}

#[test]
fn a_pruned_model_of_every_family_recovers_from_its_dense_one() {
    // A tied head, biases of queries, keys and values, norms of heads, windows, bounded scores, learned positions.
    for family in ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2"] {
        let directory = folder(family);
        let (at, dense) = (directory.path(), checkpoint(family));
        let ran = recover(at, &dense, &["distillation.hidden=0.1"]).good();
        let losses: Vec<f64> = fs::read_to_string(at.join("run/metrics.jsonl"))
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap())
            .collect();
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        assert!(mean(&losses[25..]) < 0.7 * mean(&losses[..3]), "{family}: {losses:?} {ran:?}");
        run(at, &["check", "run/model"]).good();
        // Done: the same command again changes nothing, and another teacher is another run.
        recover(at, &dense, &["distillation.hidden=0.1"]).good();
        let message = recover(at, "pruned", &["distillation.hidden=0.1"]).bad(2);
        assert!(message.contains("distillation.teacher"), "{message}");
    }
}

#[test]
fn blocks_of_a_pruned_model_are_reconstructed_from_its_dense_one() {
    let directory = folder("llama");
    let at = directory.path();
    train_by("reconstruct", at, &checkpoint("llama"), &[]).good();
    let losses: Vec<f64> = fs::read_to_string(at.join("run/metrics.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap())
        .collect();
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(mean(&losses[25..]) < 0.8 * mean(&losses[..3]), "{losses:?}");
    run(at, &["check", "run/model"]).good();
}

#[test]
fn a_teacher_that_does_not_fit_is_told_at_once() {
    let directory = folder("llama");
    let at = directory.path();
    let dense = checkpoint("llama");
    let bad = |teacher: &str, sets: &[&str]| recover(at, teacher, sets).bad(2);
    assert!(bad("absent", &[]).contains("absent"));
    assert!(bad("text.txt", &[]).contains("text.txt"));
    scratch(at);
    train(at, "bytes", &LLAMA).good();
    let vocabulary = bad("bytes", &[]);
    assert!(vocabulary.contains("bytes has 256 tokens, where the model that learns has 80"), "{vocabulary}");
    // The same number of tokens, two of which have changed places.
    copy(&dense, at.join("other"));
    let text = fs::read_to_string(at.join("other/tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let last: Vec<String> = vocabulary.iter().rev().take(2).map(|(token, _)| token.clone()).collect();
    let numbers = [vocabulary[&last[0]].clone(), vocabulary[&last[1]].clone()];
    (vocabulary[&last[1]], vocabulary[&last[0]]) = (numbers[0].clone(), numbers[1].clone());
    fs::write(at.join("other/tokenizer.json"), tokenizer.to_string()).unwrap();
    let message = bad("other", &[]);
    assert!(message.contains("another tokenizer"), "{message}");
    let message = bad(&dense, &["distillation.divergence=0"]);
    assert!(message.contains("one of them above 0"), "{message}");
    let message = bad(&dense, &["distillation.divergence=-1", "distillation.cross_entropi=1"]);
    for words in ["from 0 up", "did you mean `cross_entropy`?"] {
        assert!(message.contains(words), "{words}: {message}");
    }
    let message = bad(&dense, &["sparsity.method=fst", "sparsity.decay=auto"]);
    assert!(message.contains("trial runs have no teacher"), "{message}");
    assert!(fs::read_dir(at.join("run")).is_err(), "nothing was begun");
}

#[test]
fn a_dry_run_shows_the_teacher_and_its_memory() {
    let directory = folder("llama");
    let at = directory.path();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/recover.toml").display().to_string();
    let sets = recovery(&checkpoint("llama"));
    let all = ["train", &recipe, "--dry-run"].into_iter().chain(sets.iter().map(String::as_str));
    let shown = run(at, &all.collect::<Vec<_>>()).good();
    for words in ["learns from", "the teacher and its logits"] {
        assert!(shown.stdout.contains(words), "{words}: {shown:?}");
    }
}
