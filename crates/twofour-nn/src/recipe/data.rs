//! The data of a recipe.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::reader::Named;

/// How text becomes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Tokenizer {
    /// Every byte is a token.
    #[default]
    Bytes,
}

impl Named for Tokenizer {
    const ALL: &'static [(&'static str, Self)] = &[("bytes", Tokenizer::Bytes)];
}

/// What a model is trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSettings {
    /// Text files, joined in this order; relative to the recipe.
    pub text: Vec<PathBuf>,
    /// How text becomes tokens.
    #[serde(default)]
    pub tokenizer: Tokenizer,
    /// The share of the text, at its end, that is kept for validation.
    #[serde(default = "tenth")]
    pub validation: f64,
}

pub(super) fn tenth() -> f64 {
    0.1
}
