//! A recipe and an override from a stranger: what is accepted can be resolved and planned, and reads again as it was
//! written.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use twofour_nn::recipe::{DeviceKind, Override, Recipe};

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    // The first line is an override where it is a comment.
    let given =
        text.lines().next().and_then(|line| line.strip_prefix("# ")).and_then(|line| line.parse::<Override>().ok());
    let Ok(recipe) = Recipe::parse(text, Path::new(""), given.as_slice()) else { return };
    let plan = recipe.plan(DeviceKind::Cuda);
    // A vision transformer has a layer more, that of the patches.
    assert!(plan.layers.len() > 4 * recipe.model.layers);
    let written = toml::to_string(&recipe).expect("settings are TOML");
    let again = Recipe::parse(&written, Path::new(""), &[]).expect("our own text is accepted");
    assert_eq!(again, recipe);
});
