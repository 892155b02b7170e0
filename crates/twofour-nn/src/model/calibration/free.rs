//! Features of a block's inputs that may stand in another order.

use crate::model::{TransformerConfig, families::layout::StoredLinear, inference::layer::Role};

/// Features of an input that may stand in another order within a model that computes the same: the outputs of the
/// linear layer before it are stored in that order then. Those are the hidden features of a feed-forward block, and,
/// head by head, the values of attention. The hidden states between blocks have one order for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreeFeatures {
    /// Sets of runs of features, by their first ones, that must have one order within themselves: of attention the
    /// query heads that share their values.
    pub sets: Vec<Vec<usize>>,
    /// The features of a run.
    pub len: usize,
    /// For each set the outputs of the layer before that are in the same order, as runs.
    outputs: Vec<Vec<usize>>,
    /// The parts of that layer.
    parts: Vec<(String, usize)>,
    has_bias: bool,
    is_transposed: bool,
}

/// The outputs of a weight in another order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputOrder {
    /// The weight's name.
    pub weight: String,
    /// The name of its bias, where it has one: in the same order.
    pub bias: Option<String>,
    /// Whether the weight is stored as `[in_features, out_features]`.
    pub is_transposed: bool,
    /// Output `order[i]` comes to place `i`.
    pub order: Vec<usize>,
}

impl FreeFeatures {
    /// Returns the free features of a linear layer's input; `stored` returns the other layers of the block.
    pub(super) fn of<'s>(
        config: &TransformerConfig,
        role: Role,
        stored: impl Fn(Role) -> Option<&'s StoredLinear>,
    ) -> Option<Self> {
        let (sets, len, outputs, before) = match (role, &config.attention.latent) {
            (Role::Out, Some(latent)) => {
                let (heads, v) = (config.attention.heads, latent.value_dim);
                let plain = config.attention.head_dim.checked_sub(config.rotated())?;
                let sets = (0..heads).map(|head| vec![head * v]);
                let outputs = (0..heads).map(|head| vec![head * (plain + v) + plain]);
                (sets.collect(), v, outputs.collect(), Role::Latents)
            }
            (Role::Out, None) => {
                let (d, heads, kv_heads) =
                    (config.attention.head_dim, config.attention.heads, config.attention.kv_heads);
                let group = heads.checked_div(kv_heads)?;
                let values = config.query_width() + config.kv_width();
                let sets = (0..kv_heads).map(|kv| (kv * group..(kv + 1) * group).map(|head| head * d).collect());
                let outputs = (0..kv_heads).map(|kv| vec![values + kv * d]);
                (sets.collect(), d, outputs.collect(), Role::Qkv)
            }
            (Role::Down, _) => {
                let hidden = config.feed_forward.hidden;
                let outputs = if config.feed_forward.gated { vec![0, hidden] } else { vec![0] };
                (vec![vec![0]], hidden, vec![outputs], Role::Up)
            }
            (Role::Qkv | Role::Latents | Role::Up, _) => return None,
        };
        let StoredLinear { parts, has_bias, is_transposed, .. } = stored(before)?.clone();
        Some(FreeFeatures { sets, len, outputs, parts, has_bias, is_transposed })
    }

    /// The weights of the layer before, with the order of their outputs that goes with an order of the features:
    /// `order[j]` is the feature that comes to place `j`. Nothing for an order that does not keep to the sets.
    pub fn outputs(&self, order: &[usize]) -> Option<Vec<OutputOrder>> {
        let all: usize = self.parts.iter().map(|(_, outputs)| outputs).sum();
        let mut of_all: Vec<usize> = (0..all).collect();
        for (set, outputs) in self.sets.iter().zip(&self.outputs) {
            let within = |first: &usize| -> Option<Vec<usize>> {
                let run = order.get(*first..first + self.len)?;
                run.iter().map(|feature| feature.checked_sub(*first).filter(|place| *place < self.len)).collect()
            };
            let own = within(set.first()?)?;
            if !set.iter().all(|first| within(first).as_ref() == Some(&own)) {
                return None;
            }
            for first in outputs {
                let run = of_all.get_mut(*first..first + self.len)?;
                run.iter_mut().zip(&own).for_each(|(place, output)| *place = first + output);
            }
        }
        let mut first = 0;
        let part = |(name, outputs): &(String, usize)| {
            let range = first..first + outputs;
            first = range.end;
            let order = of_all[range.clone()].iter();
            let order: Option<Vec<usize>> =
                order.map(|output| range.contains(output).then(|| output - range.start)).collect();
            Some(OutputOrder {
                weight: format!("{name}.weight"),
                bias: self.has_bias.then(|| format!("{name}.bias")),
                is_transposed: self.is_transposed,
                order: order?,
            })
        };
        let mut parts: Vec<OutputOrder> = self.parts.iter().map(part).collect::<Option<_>>()?;
        // Queries and keys stay as they are.
        parts.retain(|part| !part.order.is_sorted());
        Some(parts)
    }
}
