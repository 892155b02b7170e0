//! Values that replace those of a recipe.

use std::str::FromStr;

/// A value that replaces one of the recipe's: `training.steps=20`.
///
/// The value is TOML; a word that is not, such as `fst`, is text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Override {
    pub(crate) key: Vec<String>,
    pub(crate) value: String,
}

/// A text that is not `KEY=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not KEY=VALUE, as in training.steps=20")]
pub struct NotAnOverride {
    text: String,
}

impl FromStr for Override {
    type Err = NotAnOverride;

    fn from_str(text: &str) -> Result<Self, NotAnOverride> {
        let fault = || NotAnOverride { text: text.to_owned() };
        let (key, value) = text.split_once('=').ok_or_else(fault)?;
        let key: Vec<String> = key.split('.').map(|part| part.trim().to_owned()).collect();
        let value = value.trim();
        // Keys of a recipe are two deep; the bound keeps a hostile text from deep recursion.
        if key.len() > 8 || key.iter().any(String::is_empty) || value.is_empty() {
            return Err(fault());
        }
        Ok(Override { key, value: value.to_owned() })
    }
}
