//! The description of a decoder.

use serde::{Deserialize, Serialize};

use super::Rope;
use crate::{
    Error, Result,
    engine::Nonlinearity,
    model::{GptConfig, VOCABULARY},
    recipe::{ModelKind, ModelSettings},
};

/// A decoder: token embedding, layers of causal attention and feed-forward blocks, each behind a norm, a last norm and a head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecoderConfig {
    /// Number of tokens.
    pub vocabulary: usize,
    /// The longest sequence, in tokens.
    pub context: usize,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; a divisor of `heads`, which share them in groups.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the feed-forward block's hidden layer.
    pub feed_forward: usize,
    /// The norms.
    pub norm: NormKind,
    /// Added to the variance, or to the mean square.
    pub epsilon: f32,
    /// How positions enter.
    pub positions: Positions,
    /// The function of the feed-forward block.
    pub activation: Nonlinearity,
    /// Whether the hidden layer is `activation(gate) ⊙ up`, of twice as many output features of the first layer: the gate's, then the other's.
    pub gated: bool,
    /// Which linear layers have biases.
    pub biases: DecoderBiases,
    /// Whether queries and keys are normalized, head by head, before they are rotated (Qwen3).
    pub head_norms: bool,
    /// Whether the head's weight is the embedding's.
    pub tied: bool,
    /// For each layer how many tokens back, itself included, a position attends to; all where there is no number. Empty where no layer has one.
    pub windows: Vec<Option<usize>>,
}

/// Which linear layers of a decoder have biases; the head has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecoderBiases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// The output of attention.
    pub out: bool,
    /// The feed-forward block.
    pub feed_forward: bool,
}

/// The norms of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormKind {
    /// Layer normalization, with gain and bias.
    Layer,
    /// Root-mean-square normalization, with a gain.
    RootMeanSquare,
}

/// How positions enter a model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Positions {
    /// Queries and keys are rotated.
    Rotary(Rope),
    /// A learned vector for each position is added to the embedding.
    Learned,
}

impl DecoderConfig {
    /// Checks the sizes against each other.
    ///
    /// # Errors
    /// [`Error::Setting`] for a size that is zero or absurd, heads that do not fit each other, a head of an odd number of elements that is to be rotated, windows for
    /// another number of layers.
    pub fn validate(&self) -> Result<()> {
        // Bounds a hostile file's sizes before anything is allocated by them.
        const LARGEST: usize = 1 << 24;
        let sizes = [
            ("vocabulary", self.vocabulary),
            ("context", self.context),
            ("layers", self.layers),
            ("width", self.width),
            ("heads", self.heads),
            ("key-value heads", self.kv_heads),
            ("elements of a head", self.head_dim),
            ("feed_forward", self.feed_forward),
        ];
        for (what, size) in sizes {
            if size == 0 || size > LARGEST {
                return Err(Error::Setting { what, found: size.to_string(), expected: "between 1 and 2^24" });
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let found = format!("{} for {} heads", self.kv_heads, self.heads);
            return Err(Error::Setting { what: "key-value heads", found, expected: "a divisor of the heads" });
        }
        if matches!(self.positions, Positions::Rotary(_)) && !self.head_dim.is_multiple_of(2) {
            let found = self.head_dim.to_string();
            return Err(Error::Setting { what: "elements of a head", found, expected: "even, as rotation requires" });
        }
        if !self.windows.is_empty() && (self.windows.len() != self.layers || self.windows.contains(&Some(0))) {
            let found = match self.windows.iter().position(|window| *window == Some(0)) {
                Some(layer) => format!("0 for layer {layer}"),
                None => format!("{} for {} layers", self.windows.len(), self.layers),
            };
            return Err(Error::Setting {
                what: "sliding windows",
                found,
                expected: "a positive number or none for each layer",
            });
        }
        Ok(())
    }

    /// Elements of the queries of a token.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of the keys of a token, and of its values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of queries, keys and values of a token.
    pub fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.kv_width()
    }

    /// Output features of the feed-forward block's first layer.
    pub fn up_width(&self) -> usize {
        if self.gated { 2 * self.feed_forward } else { self.feed_forward }
    }

    /// Output and input features of every linear layer with its name, in the order of computation.
    pub fn linear_layers(&self) -> Vec<(String, usize, usize)> {
        let DecoderConfig { width, feed_forward, .. } = *self;
        let block = |layer: usize| {
            [
                (format!("blocks.{layer}.attn.qkv"), self.qkv_width(), width),
                (format!("blocks.{layer}.attn.out"), width, self.query_width()),
                (format!("blocks.{layer}.mlp.up"), self.up_width(), width),
                (format!("blocks.{layer}.mlp.down"), width, feed_forward),
            ]
        };
        (0..self.layers).flat_map(block).chain([("head".to_owned(), self.vocabulary, width)]).collect()
    }

    /// Number of trainable parameters.
    pub fn parameters(&self) -> usize {
        let DecoderConfig { width, vocabulary, .. } = *self;
        let linear =
            |(name, out, inputs): (String, usize, usize)| out * inputs + if self.has_bias(&name) { out } else { 0 };
        let linears: usize = self.linear_layers().into_iter().map(linear).sum();
        let norm = if self.norm == NormKind::Layer { 2 * width } else { width };
        let heads = if self.head_norms { 2 * self.head_dim * self.layers } else { 0 };
        let positions = if self.positions == Positions::Learned { self.context * width } else { 0 };
        let embedding = if self.tied { 0 } else { vocabulary * width };
        linears + (2 * self.layers + 1) * norm + heads + positions + embedding
    }

    /// Whether the linear layer of that name has a bias; the head has none.
    pub(crate) fn has_bias(&self, linear: &str) -> bool {
        let DecoderBiases { qkv, out, feed_forward } = self.biases;
        match linear.rsplit('.').next() {
            Some("qkv") => qkv,
            Some("out") => out,
            Some("up" | "down") => feed_forward,
            _ => false,
        }
    }

    /// How many tokens back a position of that layer attends to.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }
}

impl From<&GptConfig> for DecoderConfig {
    fn from(config: &GptConfig) -> Self {
        let GptConfig { layers, width, heads, context, feed_forward } = *config;
        DecoderConfig {
            vocabulary: VOCABULARY,
            context,
            layers,
            width,
            heads,
            kv_heads: heads,
            head_dim: width / heads.max(1),
            feed_forward,
            norm: NormKind::Layer,
            epsilon: 1e-5,
            positions: Positions::Rotary(Rope { base: 10_000.0, scaling: None }),
            activation: Nonlinearity::Gelu,
            gated: false,
            biases: DecoderBiases { qkv: true, out: true, feed_forward: true },
            head_norms: false,
            tied: false,
            windows: vec![],
        }
    }
}

impl From<&ModelSettings> for DecoderConfig {
    fn from(settings: &ModelSettings) -> Self {
        let gpt = DecoderConfig::from(&GptConfig::from(settings));
        match settings.kind {
            // Vision transformers and encoders have descriptions of their own.
            ModelKind::Gpt | ModelKind::Vit | ModelKind::Bert => gpt,
            ModelKind::Llama => DecoderConfig {
                kv_heads: settings.kv_heads.unwrap_or(settings.heads),
                norm: NormKind::RootMeanSquare,
                activation: Nonlinearity::Silu,
                gated: true,
                biases: DecoderBiases { qkv: false, out: false, feed_forward: false },
                ..gpt
            },
        }
    }
}
