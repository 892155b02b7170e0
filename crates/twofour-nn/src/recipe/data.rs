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
    /// Text files, joined in this order; relative to the recipe. Empty for a `vit`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub text: Vec<PathBuf>,
    /// The images of a `vit`: an IDX file, as it is or in gzip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<PathBuf>,
    /// Their classes: an IDX file, as it is or in gzip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<PathBuf>,
    /// How text becomes tokens.
    #[serde(default)]
    pub tokenizer: Tokenizer,
    /// The share that is kept for validation: of the text, at its end; of images, by chance but always the same.
    #[serde(default = "tenth")]
    pub validation: f64,
}

pub(super) fn tenth() -> f64 {
    0.1
}
