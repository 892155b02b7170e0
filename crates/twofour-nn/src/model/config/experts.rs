//! Feed-forward blocks of experts.

use super::{TransformerConfig, expect_size};
use crate::{Error, Result};

/// Layers whose feed-forward block is a router and experts: each token goes through those that the router scores
/// highest, and their outputs are added, weighted by the scores.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsConfig {
    /// How many experts a layer has.
    pub count: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// Width of an expert's hidden layer.
    pub hidden: usize,
    /// Width of the hidden layer of an expert that every token goes through, with a weight of its own.
    pub shared: Option<usize>,
    /// Whether the weights of a token's experts are divided by their sum.
    pub is_normalized: bool,
    /// Layers with one feed-forward block instead.
    pub dense_layers: Vec<usize>,
    /// The function of the hidden layer, where it is not that of [`FeedForwardConfig`](super::FeedForwardConfig).
    pub clamped_gate: Option<ClampedGate>,
}

/// gpt-oss's gate: `gate · sigmoid(slope · gate) · (up + 1)`, with the gate clamped to at most the limit and `up` to ±
/// the limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedGate {
    /// The slope.
    pub slope: f32,
    /// The limit.
    pub limit: f32,
}

impl ExpertsConfig {
    pub(super) fn validate(&self) -> Result<()> {
        for (what, size) in [
            ("experts", self.count),
            ("experts of a token", self.per_token),
            ("width of an expert", self.hidden),
            ("width of the shared expert", self.shared.unwrap_or(1)),
        ] {
            expect_size(what, size, 20)?;
        }
        if self.per_token > self.count {
            let found = format!("{} of {}", self.per_token, self.count);
            return Err(Error::Setting { what: "experts of a token", found, expected: "no more than there are" });
        }
        Ok(())
    }
}

impl TransformerConfig {
    /// The experts of a layer; none where it has one feed-forward block.
    pub fn experts(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| !experts.dense_layers.contains(&layer))
    }

    /// Output features of the first layer of a feed-forward block with a hidden layer of that width.
    pub(in crate::model) fn up_width_of(&self, hidden: usize) -> usize {
        if self.feed_forward.gated { 2 * hidden } else { hidden }
    }

    /// Output and input features of the linear layers of a feed-forward block with their names.
    pub(super) fn feed_forward_layers(&self, layer: usize) -> Vec<(String, usize, usize)> {
        let width = self.width;
        let pair = |at: String, hidden: usize| {
            [(format!("{at}.up"), self.up_width_of(hidden), width), (format!("{at}.down"), width, hidden)]
        };
        let block = format!("blocks.{layer}.mlp");
        let Some(experts) = self.experts(layer) else { return pair(block, self.feed_forward.hidden).into() };
        let mut layers = vec![(format!("{block}.router"), experts.count, width)];
        layers.extend((0..experts.count).flat_map(|expert| pair(format!("{block}.experts.{expert}"), experts.hidden)));
        if let Some(hidden) = experts.shared {
            layers.push((format!("{block}.shared_gate"), 1, width));
            layers.extend(pair(format!("{block}.shared"), hidden));
        }
        layers
    }
}
