//! Recipes of vision transformers.

use super::{lines, parse};
use crate::{
    model::Pooling,
    recipe::{DeviceKind, ModelConfig, ModelKind},
};

const GOOD: &str = "
[model]
kind = 'vit'
layers = 2
width = 64
heads = 4
image = 28
patch = 4
classes = 10

[data]
images = 'images.gz'
labels = '../labels'
validation = 0.2

[training]
steps = 100
batch = 8
warm_up = 10

[sparsity]
method = 'ste'
";

/// The only mistake.
fn one(overrides: &[&str]) -> String {
    let found = lines(parse(GOOD, overrides));
    assert_eq!(found.len(), 1, "{overrides:?}: {found:?}");
    found[0].clone()
}

#[test]
fn a_recipe_of_images_is_read_and_planned() {
    let recipe = parse(GOOD, &["data.labels=here"]).unwrap();
    assert_eq!(recipe.model.kind, ModelKind::Vit);
    assert_eq!(recipe.data.images.as_deref(), Some("folder/images.gz".as_ref()));
    assert_eq!(recipe.data.labels.as_deref(), Some("here".as_ref()), "relative to the working directory");
    let plan = recipe.plan(DeviceKind::Cuda);
    // 49 patches and the class token.
    assert_eq!((plan.step_tokens, plan.tokens), (8 * 50, 8 * 50 * 100));
    assert_eq!((plan.classes, plan.vocabulary, plan.tokenizer), (Some(10), None, None));
    let block = 64 * 192 + 192 + 64 * 64 + 64 + 2 * 64 * 256 + 256 + 64;
    let expected = (16 * 64 + 64) + 2 * block + 5 * 128 + (64 * 10 + 10) + 50 * 64;
    assert_eq!(plan.parameters, expected);
    assert_eq!(plan.sparse_weights, 4 * 64 * 256);
    let names: Vec<&str> = plan.layers.iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!((names.len(), names[0], names[9]), (10, "patches", "head"));
    let ModelConfig::Vit(config) = recipe.model_config() else { panic!("{recipe:?}") };
    assert_eq!((config.pooling, config.channels, config.image), (Pooling::Class, 1, [28, 28]));
    let mean = parse(GOOD, &["model.pooling=mean"]).unwrap();
    assert_eq!(mean.model_config().positions(), 49, "without a class token");
}

#[test]
fn keys_of_other_models_and_sizes_that_do_not_fit_are_refused() {
    for (set, words) in [
        ("model.patch=5", "divisor of the image's 28 pixels"),
        ("model.classes=257", "labels are bytes"),
        ("model.pooling=max", "`mean`"),
        ("model.heads=5", "divisor of the width"),
        ("model.context=8", "image and patch decide"),
        ("model.kv_heads=2", "\"llama\""),
        ("data.text=a.txt", "give data.images"),
        ("data.tokenizer=t.json", "give data.images"),
        ("data.images=['a', 'b']", "expected text"),
        ("sparsity.layers=['patch']", "matches no linear layer"),
        ("training.linear_probe=1", "true or false"),
        ("training.frozen_embeddings=true", "only a decoder"),
        ("distillation.teacher=model", "only a decoder"),
    ] {
        let found = one(&[set]);
        assert!(found.contains(words), "{set}: {found}");
    }
    let text = super::GOOD;
    for set in ["model.image=28", "model.pooling=mean", "data.images=a", "data.labels=a", "training.linear_probe=true"]
    {
        let found = lines(parse(text, &[set]));
        assert!(found.len() == 1 && found[0].contains("\"vit\""), "{set}: {found:?}");
    }
    let without = GOOD.replace("images = 'images.gz'\n", "").replace("image = 28\n", "");
    let found = lines(parse(&without, &[])).join("\n");
    assert!(found.contains("data.images") && found.contains("model.image"), "{found}");
}

#[test]
fn what_is_written_is_read_again() {
    for set in ["training.linear_probe=true", "model.pooling=mean", "model.channels=3"] {
        let recipe = parse(GOOD, &[set]).unwrap();
        let written = toml::to_string(&recipe).unwrap();
        assert_eq!(crate::recipe::Recipe::parse(&written, "".as_ref(), &[]).unwrap(), recipe, "{written}");
    }
}
