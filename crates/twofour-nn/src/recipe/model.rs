//! The model of a recipe.

use serde::{Deserialize, Serialize};

use super::reader::Named;

/// Number of tokens: every byte is one.
pub(super) const VOCABULARY: usize = 256;

/// The name of the linear layer that computes logits.
pub(super) const HEAD: &str = "head";

/// The architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ModelKind {
    /// A decoder with layer norms, rotary positions and a GELU feed-forward block.
    #[default]
    Gpt,
}

impl Named for ModelKind {
    const ALL: &'static [(&'static str, Self)] = &[("gpt", ModelKind::Gpt)];
}

/// The sizes of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSettings {
    /// The architecture.
    #[serde(default)]
    pub kind: ModelKind,
    /// Number of layers, each an attention block and a feed-forward block.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Heads of attention.
    pub heads: usize,
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

    /// Output and input features of every linear layer with its name, in the order of computation.
    pub fn linear_layers(&self) -> Vec<(String, usize, usize)> {
        let (width, hidden) = (self.width, self.feed_forward());
        let of_block = |block: usize| {
            [
                (format!("blocks.{block}.attn.qkv"), 3 * width, width),
                (format!("blocks.{block}.attn.out"), width, width),
                (format!("blocks.{block}.mlp.up"), hidden, width),
                (format!("blocks.{block}.mlp.down"), width, hidden),
            ]
        };
        let mut all: Vec<_> = (0..self.layers).flat_map(of_block).collect();
        all.push((HEAD.to_owned(), VOCABULARY, width));
        all
    }

    /// Number of trainable parameters: weights, the biases of all linear layers but the head, gain and bias of two norms in each layer and
    /// of one at the end, and the embedding.
    pub fn parameters(&self) -> usize {
        let layers = self.linear_layers();
        let weights: usize = layers.iter().map(|(_, out, inputs)| out * inputs).sum();
        let biases = layers.iter().map(|(_, out, _)| out).sum::<usize>() - VOCABULARY;
        weights + biases + (2 * self.layers + 1) * 2 * self.width + VOCABULARY * self.width
    }
}
