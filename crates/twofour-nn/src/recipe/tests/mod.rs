//! Recipes, right and wrong.

mod sparsifier;
mod sparsity;
mod vision;

use std::path::Path;

use proptest::prelude::*;

use super::{DeviceKind, Method, Mistakes, Override, Precision, Recipe};
use crate::train::SparseBegin;

const GOOD: &str = "\
[model]
layers = 2
width = 64
heads = 4
context = 32

[data]
text = ['a.txt', '../b.txt']

[training]
steps = 100
batch = 8
warm_up = 10

[sparsity]
method = 'fst'
";

fn parse(text: &str, overrides: &[&str]) -> Result<Recipe, Mistakes> {
    let overrides: Vec<Override> = overrides.iter().map(|text| text.parse().unwrap()).collect();
    Recipe::parse(text, Path::new("folder"), &overrides)
}

fn lines(result: Result<Recipe, Mistakes>) -> Vec<String> {
    result.unwrap_err().iter().map(ToString::to_string).collect()
}

#[test]
fn a_recipe_is_read_with_its_defaults_and_overrides() {
    let recipe = parse(GOOD, &["training.steps=20", "sparsity.method=ste", "data.text=['c.txt']", "training.seed=7"]);
    let recipe = recipe.unwrap();
    assert_eq!((recipe.training.steps, recipe.training.seed, recipe.training.batch), (20, 7, 8));
    assert_eq!(recipe.sparsity.method, Method::STE);
    assert_eq!(recipe.data.text, [Path::new("c.txt")], "an override's path is relative to the working directory");
    assert_eq!(parse(GOOD, &[]).unwrap().data.text, [Path::new("folder/a.txt"), Path::new("folder/../b.txt")]);
    assert_eq!(recipe.precision_on(DeviceKind::Cuda), Precision::Bf16);
}

#[test]
fn a_llama_has_its_own_sizes() {
    use crate::{model::TransformerConfig, recipe::ModelKind};
    let recipe = parse(GOOD, &["model.kind=llama", "model.kv_heads=2", "model.feed_forward=96"]).unwrap();
    assert_eq!((recipe.model.kind, recipe.model.kv_heads), (ModelKind::Llama, Some(2)));
    let layers: Vec<_> = recipe.layers().into_iter().map(|l| (l.name, l.out_features, l.in_features)).collect();
    assert_eq!(
        layers[..3],
        [
            ("blocks.0.attn.qkv".to_owned(), 64 + 2 * 32, 64),
            ("blocks.0.attn.out".to_owned(), 64, 64),
            ("blocks.0.mlp.up".to_owned(), 2 * 96, 64),
        ]
    );
    assert_eq!(recipe.plan(DeviceKind::Cpu).parameters, TransformerConfig::from(&recipe.model).parameters());
    for (overrides, word) in [
        (&["model.kind=llama", "model.kv_heads=3"][..], "divisor of the 4 heads"),
        (&["model.kv_heads=2"], "only a \"llama\""),
        (&["model.kind=llama", "model.kv_heads=0"], "kv_heads"),
    ] {
        let lines = lines(parse(GOOD, overrides));
        assert!(lines.len() == 1 && lines[0].contains(word), "{lines:?}");
    }
    // With as many as heads, and for recipes of before, the key is not written.
    let text = toml::to_string(&parse(GOOD, &[]).unwrap()).unwrap();
    assert!(!text.contains("kv_heads"), "{text}");
}

#[test]
fn what_is_written_is_read_again() {
    for method in ["dense", "fixed", "ste", "sr-ste", "fst", "s-ste", "step", "gradual", "activation"] {
        let recipe = parse(GOOD, &[&format!("sparsity.method={method}"), "training.schedule=wsd"]).unwrap();
        let text = toml::to_string(&recipe).unwrap();
        assert_eq!(Recipe::parse(&text, Path::new(""), &[]).unwrap(), recipe, "{text}");
        assert_eq!(toml::from_str::<Recipe>(&text).unwrap(), recipe);
    }
}

#[test]
fn every_mistake_is_reported_at_once_with_its_line() {
    let text = "\
[model]
layers = 0
width = 64
heads = 3
contxt = 32
[data]
text = 5
tokenizer = 'byte'
[trainig]
steps = 5
[sparsity]
method = 'fsst'
";
    assert_eq!(
        lines(parse(text, &["training.learning_rate=fast", "sparsity.nask=optimal"])),
        [
            "line 1: model.context: is missing: the longest sequence, in tokens",
            "line 2: model.layers: found 0, expected a whole number from 1 to 1048576",
            "line 5: model.contxt: unknown key; did you mean `context`?",
            "line 7: data.text: found 5, expected text, or a list of texts",
            "line 8: data.tokenizer: found \"byte\"; did you mean `bytes`? It may also be the path of a tokenizer.json",
            "line 9: trainig: unknown section; did you mean `training`?",
            "line 12: sparsity.method: found \"fsst\"; did you mean `fst`?",
            "override: training.learning_rate: found \"fast\", expected a number above 0",
            "override: sparsity.nask: unknown key; did you mean `mask`?",
        ]
    );
}

#[test]
fn syntax_errors_are_reported_with_what_else_is_wrong() {
    let found = lines(parse("[model]\nlayers = = 2\nwidth = -5\n[data\ntext = 'a'\n", &[]));
    assert!(found.iter().any(|line| line.starts_with("line 2: ")), "{found:?}");
    assert!(found.iter().any(|line| line.starts_with("line 3: model.width")), "{found:?}");
}

/// The one mistake of a recipe with overrides.
#[track_caller]
fn one(overrides: &[&str]) -> String {
    let found = lines(parse(GOOD, overrides));
    assert_eq!(found.len(), 1, "{found:#?}");
    found.into_iter().next().unwrap()
}

#[test]
fn methods_and_settings_that_exclude_each_other_are_refused() {
    for (method, setting, word) in [
        ("dense", "decay=1e-4", "no layer is 2:4"),
        ("dense", "mask=optimal", "no layer is 2:4"),
        ("dense", "end=0.5", "no layer is 2:4"),
        ("fixed", "weight_gradient=mvue", "MVUE"),
        ("fixed", "mask_every=5", "chosen once"),
        ("fixed", "decay=1e-4", "sr-ste"),
        ("ste", "decay_target=weight", "sr-ste"),
        ("ste", "mask=soft-threshold", "s-ste"),
        ("ste", "weight_gradient=masked", "fixed"),
        ("fst", "mask=magnitude", "transposable"),
        ("fst", "mask=soft-threshold", "s-ste"),
        ("s-ste", "mask=optimal", "soft-threshold"),
        ("s-ste", "mask_every=40", "every step"),
        ("step", "mask_every=1", "every step"),
        ("step", "two_of_four_from=0.5", "gradual"),
        ("activation", "mask_every=2", "each pass"),
        ("activation", "mask=magnitude", "transposable"),
        ("activation", "weight_gradient=dense", "each pass"),
        ("activation", "precision=fp8", "f16"),
        ("activation", "observe=true", "each pass"),
        ("dense", "precision=fp8", "no layer is 2:4"),
        ("s-ste", "two_of_four_from=0.5", "gradual"),
        ("ste", "switch_latest=0.5", "step"),
        ("fst", "switch_mean=geometric", "step"),
        ("ste", "defaults=2by4-pretrain", "s-ste"),
        ("ste", "decay=auto", "sr-ste"),
        ("dense", "two_of_four_from=0.5", "no layer is 2:4"),
    ] {
        let found = one(&[&format!("sparsity.method={method}"), &format!("sparsity.{setting}")]);
        assert!(found.contains(word) && found.contains(method), "{method} {setting}: {found}");
    }
}

#[test]
fn schedules_beyond_the_run_and_batches_that_do_not_divide_are_refused() {
    for (setting, word) in [
        ("training.warm_up=101", "beyond the run of 100 steps"),
        ("training.micro_batch=3", "divisor of the batch of 8"),
        ("training.final_learning_rate=1.0", "at most the learning rate"),
        ("training.decay_steps=5", "wsd"),
        ("sparsity.mask_every=101", "beyond the run"),
        ("sparsity.begin=0.9", "never"),
        ("sparsity.end=0.0", "never"),
        ("sparsity.begin=1.5", "share from 0 to 1"),
        ("model.heads=5", "divisor of the width"),
        ("data.validation=0.7", "at most 0.5"),
        ("data.text=[]", "at least one file"),
        ("training.steps=99999999999999999999", "above 2^63 - 1"),
        ("training.learning_rate=nan", "above 0"),
        ("training=5", "expected a section"),
    ] {
        let found = one(&[setting]);
        assert!(found.contains(word) && found.starts_with("override: "), "{setting}: {found}");
    }
    for (steps, word) in [(95, "beyond the run of 100 steps"), (1, "at least 2")] {
        let wsd = one(&["training.schedule=wsd", &format!("training.decay_steps={steps}")]);
        assert!(wsd.contains(word), "{wsd}");
    }
}

#[test]
fn keys_of_the_other_optimizer_are_refused() {
    let (sgd, adamw) = ("training.optimizer=sgd", "training.optimizer=adamw");
    for (optimizer, setting) in [
        (adamw, "training.momentum=0.5"),
        (sgd, "training.beta1=0.5"),
        (sgd, "training.beta2=0.5"),
        (sgd, "training.epsilon=1e-6"),
    ] {
        let found = one(&["sparsity.method=ste", optimizer, setting]);
        let key = setting.split('=').next().unwrap();
        assert!(found.contains(key) && found.contains("and the optimizer is"), "{found}");
        assert!(found.contains("its default"), "{found}");
        let other = if optimizer == sgd { adamw } else { sgd };
        let recipe = parse(GOOD, &["sparsity.method=ste", other, setting]).unwrap();
        // What is written has all keys, and is read again.
        let text = toml::to_string(&recipe).unwrap();
        assert_eq!(Recipe::parse(&text, Path::new(""), &[]).unwrap(), recipe, "{text}");
    }
}

#[test]
fn messages_name_the_element_and_the_true_bounds() {
    for (setting, words) in [
        ("training.seed=18446744073709551615", "expected a whole number from 0 to 9223372036854775807"),
        ("training.seed=-1", "expected a whole number from 0 to 9223372036854775807"),
        ("data.tokenizer=short.txt", "expected `bytes`, `checkpoint`, or the path of a tokenizer.json"),
    ] {
        let found = one(&[setting]);
        assert!(found.contains(words), "{found}");
    }
    assert_eq!(parse(GOOD, &["training.seed=9223372036854775807"]).unwrap().training.seed, i64::MAX as u64);
    let sparsifier = ["sparsity.method=sparsifier", "sparsity.sparsifier.kind=weight-norm"];
    let found = one(&[sparsifier[0], sparsifier[1], "sparsity.sparsifier.block=[4, -1]"]);
    assert!(found.contains("found -1 as element 2 of the list, expected a whole number from 1"), "{found}");
}

#[test]
fn patterns_without_a_layer_name_the_closest_ones() {
    let found = one(&["sparsity.layers=['blocks.*.mlp.upp', '*.mlp.down']"]);
    assert!(found.contains("\"blocks.*.mlp.upp\" matches no linear layer") && found.contains("\"blocks.*.mlp.up\""));
    assert!(one(&["sparsity.layers=['head[']"]).contains("head["));
    assert!(one(&["sparsity.layers=[]"]).contains("dense"));
    let recipe = parse(GOOD, &["sparsity.layers=['blocks.0.*', 'head']"]).unwrap();
    let sparse: Vec<_> = recipe.layers().into_iter().filter(|layer| layer.sparse).map(|layer| layer.name).collect();
    assert_eq!(sparse.len(), 5);
    assert_eq!(sparse[0], "blocks.0.attn.qkv");
}

#[test]
fn methods_mean_what_their_documentation_says() {
    let plan = |overrides: &[&str]| parse(GOOD, overrides).unwrap().sparsity_plan().unwrap();
    let fst = plan(&[]);
    assert_eq!((fst.mask_every, fst.end, fst.rule.name()), (40, Some(84), "greedy"));
    assert_eq!((fst.begin, fst.layers.len()), (SparseBegin::Step(0), 4));
    assert!(fst.decay.is_some());
    assert_eq!(plan(&["sparsity.method=step"]).begin, SparseBegin::Settled { earliest: 10, latest: 50 });
    assert_eq!(plan(&["sparsity.method=fixed"]).mask_every, 0);
    let then_dense = plan(&["sparsity.method=ste", "sparsity.begin=0.1", "sparsity.end=0.4"]);
    assert_eq!((then_dense.begin, then_dense.end), (SparseBegin::Step(10), Some(40)));
    assert!(plan(&["sparsity.method=dense"]).layers.is_empty());
}

#[test]
fn the_plan_counts_and_says_why() {
    let recipe = parse(GOOD, &["model.feed_forward=130"]).unwrap();
    let plan = recipe.plan(DeviceKind::Cuda);
    // Two blocks of two layers of 64 x 130.
    assert_eq!(plan.sparse_weights, 4 * 64 * 130);
    assert_eq!((plan.step_tokens, plan.tokens), (8 * 32, 8 * 32 * 100));
    let reason = |name: &str| plan.layers.iter().find(|layer| layer.name == name).unwrap().reason.clone();
    assert_eq!(reason("blocks.0.mlp.down"), "in_features padded from 130 to 132");
    assert_eq!(reason("blocks.0.mlp.up"), "out_features padded from 130 to 132");
    assert!(reason("head").contains("feed-forward"));
    let memory = plan.memory;
    assert_eq!(memory.masters, 4 * plan.parameters as u64);
    assert_eq!(memory.copies, 2 * (plan.parameters - plan.sparse_weights) as u64);
    let dense = parse(GOOD, &["sparsity.method=dense"]).unwrap().plan(DeviceKind::Cpu);
    assert_eq!((dense.memory.packed, dense.sparse_weights, dense.precision), (0, 0, "f32"));
    assert_eq!(dense.memory.copies, 0);
    // Weights, biases, norms and embedding, counted by hand for two blocks of width 64.
    assert_eq!(
        dense.parameters,
        2 * (64 * 192 + 192 + 64 * 64 + 64 + 2 * 64 * 256 + 256 + 64) + 5 * 128 + 2 * 256 * 64
    );
}

/// What a step of GPT-2 774M's sizes holds beside its activations.
#[test]
fn a_2_to_4_model_takes_at_most_two_percent_more_memory_than_a_dense_one() {
    let sizes = ["layers=36", "width=1280", "heads=20", "context=1024", "feed_forward=5120"];
    let memory = |method: &str| {
        let sizes = sizes.map(|size| format!("model.{size}"));
        let mut overrides: Vec<&str> = sizes.iter().map(String::as_str).collect();
        overrides.push(method);
        let plan = parse(GOOD, &overrides).unwrap().plan(DeviceKind::Cuda);
        (plan.memory.total() - plan.memory.activations, plan.memory.packed, plan.sparse_weights as u64)
    };
    let (dense, ..) = memory("sparsity.method=dense");
    for (method, eighths) in [("sparsity.method=fst", 19), ("sparsity.method=ste", 10)] {
        let (total, packed, weights) = memory(method);
        assert_eq!((packed, weights), (weights / 8 * eighths, 36 * 2 * 1280 * 5120), "{method}");
        assert!(total <= dense + dense / 50, "{method}: {total} bytes, dense {dense}");
    }
}

#[test]
fn a_device_computes_in_the_precisions_that_it_has() {
    let on = |device, sets: &[&str]| parse(GOOD, sets).unwrap().compute_type(device).map_err(|m| m.to_string());
    assert_eq!(on(DeviceKind::Cpu, &[]), Ok(twofour::DataType::F32));
    assert_eq!(on(DeviceKind::Cuda, &[]), Ok(twofour::DataType::BF16));
    assert!(on(DeviceKind::Cpu, &["training.precision=f16"]).unwrap_err().contains("the CPU trains in \"f32\""));
    assert!(on(DeviceKind::Cuda, &["training.precision=f32"]).unwrap_err().contains("bf16"));
    let dense = ["training.precision=f32", "sparsity.method=dense"];
    assert_eq!(on(DeviceKind::Cuda, &dense), Ok(twofour::DataType::F32));
}

#[test]
fn text_that_is_absent_empty_or_short_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = |texts: &[&str], length: usize| {
        std::fs::write(folder.path().join("full.txt"), vec![b'a'; length]).unwrap();
        std::fs::write(folder.path().join("empty.txt"), "").unwrap();
        let mut recipe = parse(GOOD, &[]).unwrap();
        recipe.data.text = texts.iter().map(|name| folder.path().join(name)).collect();
        recipe.read_text()
    };
    let found = recipe(&["absent.txt", "empty.txt", "full.txt"], 1000).unwrap_err().to_string();
    assert!(found.contains("2 mistakes") && found.contains("absent.txt") && found.contains("empty.txt: is empty"));
    assert!(recipe(&["full.txt"], 329).unwrap_err().to_string().contains("32 of 329 bytes are for validation"));
    assert_eq!(recipe(&["full.txt", "full.txt"], 500).unwrap().len(), 1000);
}

proptest! {
    #[test]
    fn parsing_never_panics(text in ".{0,200}", key in "[a-z.]{1,20}", value in ".{1,20}") {
        let overrides: Vec<Override> = format!("{key}={value}").parse().into_iter().collect();
        let _ = Recipe::parse(&text, Path::new(""), &overrides);
    }

    /// A valid recipe with some bytes replaced: what is accepted can be resolved, planned, written, and read again.
    #[test]
    fn damaged_recipes_are_refused_or_work(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), "[a-z0-9.='\\[\\]{}\n-]{0,3}"), 0..4),
    ) {
        let mut text = GOOD.to_owned();
        for (place, new) in edits {
            let at = place.index(text.len());
            text.replace_range(at..=at, &new);
        }
        if let Ok(recipe) = Recipe::parse(&text, Path::new(""), &[]) {
            let _ = recipe.plan(DeviceKind::Cpu);
            let written = toml::to_string(&recipe).unwrap();
            prop_assert_eq!(Recipe::parse(&written, Path::new(""), &[]).unwrap(), recipe, "{}", written);
        }
    }
}
