//! The data of a recipe.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// How text becomes tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
#[non_exhaustive]
pub enum Tokenizer {
    /// Every byte is a token.
    #[default]
    Bytes,
    /// By the `tokenizer.json` of the checkpoint that training starts from.
    Checkpoint,
    /// By a `tokenizer.json`; relative to the recipe.
    File(PathBuf),
}

impl Tokenizer {
    /// The names of those that are no files.
    pub(super) const NAMES: [&'static str; 2] = ["bytes", "checkpoint"];
}

impl From<String> for Tokenizer {
    fn from(text: String) -> Self {
        match text.as_str() {
            "bytes" => Tokenizer::Bytes,
            "checkpoint" => Tokenizer::Checkpoint,
            _ => Tokenizer::File(text.into()),
        }
    }
}

impl From<Tokenizer> for String {
    fn from(tokenizer: Tokenizer) -> Self {
        match tokenizer {
            Tokenizer::Bytes => "bytes".to_owned(),
            Tokenizer::Checkpoint => "checkpoint".to_owned(),
            Tokenizer::File(path) => path.to_string_lossy().into_owned(),
        }
    }
}

/// What a model is trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataSettings {
    /// Text files, joined in this order; relative to the recipe. Empty for a `vit`, and for a `bert` that learns
    /// answers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub text: Vec<PathBuf>,
    /// Files of questions in SQuAD's JSON format for a `bert` that learns answers; relative to the recipe.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub questions: Vec<PathBuf>,
    /// The images of a `vit`: an IDX file, as it is or in gzip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<PathBuf>,
    /// Their classes: an IDX file, as it is or in gzip.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<PathBuf>,
    /// How text becomes tokens.
    #[serde(default)]
    pub tokenizer: Tokenizer,
    /// The share that is kept for validation: of the text, at its end; of questions, those of the last texts; of
    /// images, by chance but always the same.
    #[serde(default = "tenth")]
    pub validation: f64,
}

pub(super) fn tenth() -> f64 {
    0.1
}
