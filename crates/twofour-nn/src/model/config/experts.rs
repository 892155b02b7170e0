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
    /// An expert that every token goes through.
    pub shared: Option<SharedExpert>,
    /// How the router's scores choose experts, and weigh them.
    pub routing: Routing,
    /// Whether the weights of a token's experts are divided by their sum.
    pub is_normalized: bool,
    /// Layers with one feed-forward block instead.
    pub dense_layers: Vec<usize>,
    /// The function of the hidden layer, where it is not that of [`FeedForwardConfig`](super::FeedForwardConfig).
    pub clamped_gate: Option<ClampedGate>,
}

/// An expert that every token goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    /// Width of its hidden layer.
    pub hidden: usize,
    /// Whether its output has a weight of its own, by a score for each token; otherwise it is added as it is.
    pub has_gate: bool,
}

/// How the router's scores choose experts, and weigh them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// What weights are made of scores.
    pub function: ScoreFunction,
    /// Whether a number of its own is added to each expert's weight where experts are chosen, not where they are
    /// weighed (DeepSeek-V3).
    pub is_corrected: bool,
    /// Which experts a token may have, where not all of them.
    pub groups: Option<ExpertGroups>,
    /// What the weights of the chosen experts are multiplied by.
    pub factor: f32,
}

/// What makes weights of a router's scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ScoreFunction {
    /// The softmax over all experts.
    #[default]
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
}

/// Experts in groups of neighbours, all of one size: a token has experts of the best groups alone (DeepSeek).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many groups there are.
    pub count: usize,
    /// How many of them a token's experts may be of.
    pub kept: usize,
    /// A group is as good as the sum of its best so many experts.
    pub best: usize,
}

impl Default for Routing {
    /// The softmax's highest weights.
    fn default() -> Self {
        Routing { function: ScoreFunction::Softmax, is_corrected: false, groups: None, factor: 1.0 }
    }
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
            ("width of the shared expert", self.shared.map_or(1, |shared| shared.hidden)),
        ] {
            expect_size(what, size, 20)?;
        }
        if self.per_token > self.count {
            let found = format!("{} of {}", self.per_token, self.count);
            return Err(Error::Setting { what: "experts of a token", found, expected: "no more than there are" });
        }
        self.routing.validate(self)
    }
}

impl Routing {
    fn validate(&self, experts: &ExpertsConfig) -> Result<()> {
        if !(self.factor.is_finite() && self.factor > 0.0) {
            let (what, found) = ("the factor of experts' weights", self.factor.to_string());
            return Err(Error::Setting { what, found, expected: "a number above 0" });
        }
        let Some(ExpertGroups { count, kept, best }) = self.groups else { return Ok(()) };
        let size = experts.count.checked_div(count).unwrap_or_default();
        let fits = size * count == experts.count && (1..=count).contains(&kept) && (1..=size).contains(&best);
        if fits && experts.per_token <= kept * size {
            return Ok(());
        }
        let found = format!("{kept} of {count}, each by its best {best}, for {} experts", experts.count);
        let expected = "groups of one size, of which so many have the experts of a token";
        Err(Error::Setting { what: "groups of experts", found, expected })
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
        if let Some(SharedExpert { hidden, has_gate }) = experts.shared {
            layers.extend(has_gate.then(|| (format!("{block}.shared_gate"), 1, width)));
            layers.extend(pair(format!("{block}.shared"), hidden));
        }
        layers
    }
}
