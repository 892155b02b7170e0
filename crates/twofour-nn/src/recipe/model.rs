//! The model of a recipe.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::reader::Named;

/// The architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ModelKind {
    /// A decoder with layer norms, rotary positions and a GELU feed-forward block.
    #[default]
    Gpt,
    /// A decoder as LLaMA's: root-mean-square norms, rotary positions, grouped queries and a SwiGLU feed-forward block, without biases.
    Llama,
}

impl Named for ModelKind {
    const ALL: &'static [(&'static str, Self)] = &[("gpt", ModelKind::Gpt), ("llama", ModelKind::Llama)];
}

/// The sizes of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSettings {
    /// The model that training starts from ([`SavedModel`](crate::model::SavedModel)): its path, and its weights instead of random ones; relative to the recipe. The sizes are
    /// then the model's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<PathBuf>,
    /// The architecture.
    #[serde(default)]
    pub kind: ModelKind,
    /// Number of layers, each an attention block and a feed-forward block.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Heads of keys and values of a `llama`, which groups of heads share; as many as heads if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// The longest sequence, in tokens.
    pub context: usize,
    /// Width of the feed-forward block's hidden layer; four times the width if absent.
    pub feed_forward: Option<usize>,
}

impl ModelSettings {
    /// Width of the feed-forward block's hidden layer.
    pub fn feed_forward(&self) -> usize {
        self.feed_forward.unwrap_or(4 * self.width)
    }
}
