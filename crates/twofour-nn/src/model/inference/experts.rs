//! A feed-forward block of experts: a router sends each token to some of them.
//!
//! Hidden layers are kept one expert after the other, each with the tokens that it gets, and behind them that of the
//! expert that gets every token:
//!
//! ```text
//! tokens           0 1 2 3
//! experts          0,2 1,2 0,1 2,0
//! hidden layers    0: 0 2 3    1: 1 2    2: 0 1 3    shared: 0 1 2 3
//! ```

use std::ops::Range;

use twofour::kernel::{Activation, KernelElement};

use super::{hidden_layer::HiddenLayer, linear::Linear, parts::Parts, passes::widened};
use crate::{
    Result,
    cpu::softmax,
    model::config::{ClampedGate, ExpertGroups, ExpertsConfig, ScoreFunction, SharedExpert, TransformerConfig},
};

/// The router and the experts of a layer.
#[derive(Debug)]
pub(crate) struct Experts<T: KernelElement> {
    config: ExpertsConfig,
    router: Linear<T>,
    /// What is added to the weights of experts where they are chosen.
    correction: Option<Vec<f32>>,
    experts: Vec<HiddenLayer<T>>,
    shared: Option<Shared<T>>,
}

/// The expert that gets every token, with what scores it, where something does.
#[derive(Debug)]
struct Shared<T: KernelElement> {
    gate: Option<Linear<T>>,
    layer: HiddenLayer<T>,
}

/// Tokens with the weights that an expert's outputs have for them, in the order of the tokens.
pub(crate) type Routed = Vec<(usize, f32)>;

impl<T: KernelElement> Experts<T> {
    /// Builds the experts whose parts' names begin with `at`.
    pub(super) fn build(
        config: &TransformerConfig,
        experts: &ExpertsConfig,
        parts: &impl Parts<T>,
        at: &str,
    ) -> Result<Self> {
        let layer = |name: String, width: usize| HiddenLayer::build(config, parts, &format!("{at}.{name}"), width);
        let shared = |own: SharedExpert| -> Result<Shared<T>> {
            let gate = own.has_gate.then(|| parts.linear(&format!("{at}.shared_gate"), (1, config.width)));
            Ok(Shared { gate: gate.transpose()?, layer: layer("shared".to_owned(), own.hidden)? })
        };
        let all = (0..experts.count).map(|expert| layer(format!("experts.{expert}"), experts.hidden));
        Ok(Experts {
            config: experts.clone(),
            router: parts.linear(&format!("{at}.router"), (experts.count, config.width))?,
            correction: correction(experts, parts, at)?,
            experts: all.collect::<Result<_>>()?,
            shared: experts.shared.map(shared).transpose()?,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        let shared = self
            .shared
            .as_ref()
            .map_or(0, |shared| shared.gate.as_ref().map_or(0, Linear::bytes) + shared.layer.bytes());
        self.router.bytes() + self.experts.iter().map(HiddenLayer::bytes).sum::<usize>() + shared
    }

    /// [`ExpertsConfig::route`] for inputs `x: [tokens, width]`.
    pub(crate) fn route(&self, x: &[T], tokens: usize) -> Result<Vec<Routed>> {
        let scores = |layer: &Linear<T>| layer.forward(x, tokens, Activation::Identity).map(|scores| widened(&scores));
        let shared = self.shared.as_ref().and_then(|shared| shared.gate.as_ref()).map(scores).transpose()?;
        Ok(self.config.route(scores(&self.router)?, self.correction.as_deref(), shared))
    }

    /// All hidden layers, the shared one last.
    fn layers(&self) -> impl Iterator<Item = &HiddenLayer<T>> {
        self.experts.iter().chain(self.shared.as_ref().map(|shared| &shared.layer))
    }

    /// The hidden layers of inputs `x: [tokens, width]`.
    pub(super) fn hidden(&self, config: &TransformerConfig, x: &[T], tokens: usize) -> Result<Vec<T>> {
        let mut hidden = vec![];
        for (layer, routed) in self.layers().zip(self.route(x, tokens)?) {
            if !routed.is_empty() {
                hidden.append(&mut layer.hidden(config, &rows(x, config.width, &routed), routed.len())?);
            }
        }
        Ok(hidden)
    }

    /// The hidden layer of one expert, for the inputs `[tokens, width]` of so many tokens.
    pub(crate) fn hidden_of(
        &self,
        config: &TransformerConfig,
        expert: usize,
        (x, tokens): (&[T], usize),
    ) -> Result<Option<Vec<T>>> {
        match self.layers().nth(expert) {
            Some(_) if tokens == 0 => Ok(Some(vec![])),
            Some(layer) => layer.hidden(config, x, tokens).map(Some),
            None => Ok(None),
        }
    }

    /// Where the hidden layer of each expert lies, and its width.
    pub(crate) fn places(&self, routed: &[Routed]) -> Vec<(Range<usize>, usize)> {
        let mut end = 0;
        let place = |(layer, routed): (&HiddenLayer<T>, &Routed)| {
            let first = end;
            end += routed.len() * layer.width;
            (first..end, layer.width)
        };
        self.layers().zip(routed).map(place).collect()
    }

    /// The sums of the experts' outputs, `[tokens, width]`, from the hidden layers of inputs `x`.
    pub(super) fn outputs(&self, x: &[T], hidden: &[T], tokens: usize) -> Result<Vec<f32>> {
        let routed = self.route(x, tokens)?;
        let width = x.len() / tokens.max(1);
        let mut sums = vec![0f32; x.len()];
        for ((layer, routed), (place, _)) in self.layers().zip(&routed).zip(self.places(&routed)) {
            if routed.is_empty() {
                continue;
            }
            let outputs = layer.down.forward(&hidden[place], routed.len(), Activation::Identity)?;
            for (output, (token, weight)) in outputs.chunks_exact(width).zip(routed) {
                let sum = &mut sums[token * width..][..width];
                sum.iter_mut().zip(output).for_each(|(sum, output)| *sum += weight * output.to_f32());
            }
        }
        Ok(sums)
    }
}

/// What is added to the weights of experts where they are chosen, where something is.
pub(super) fn correction<T: KernelElement>(
    experts: &ExpertsConfig,
    parts: &impl Parts<T>,
    at: &str,
) -> Result<Option<Vec<f32>>> {
    experts.routing.is_corrected.then(|| parts.vector(&format!("{at}.correction"), experts.count)).transpose()
}

fn sigmoid(score: f32) -> f32 {
    1.0 / (1.0 + (-score).exp())
}

/// The numbers of the highest values; of equal ones the lower number comes first.
fn highest(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]));
    order.truncate(count);
    order
}

impl ExpertGroups {
    /// Leaves no weight to experts outside of the best groups.
    fn mask(self, weights: &mut [f32]) {
        let size = (weights.len() / self.count.max(1)).max(1);
        let best = |group: &[f32]| highest(group, self.best).into_iter().map(|expert| group[expert]).sum();
        let groups: Vec<f32> = weights.chunks(size).map(best).collect();
        let kept = highest(&groups, self.kept);
        let others = weights.chunks_mut(size).enumerate().filter(|(group, _)| !kept.contains(group));
        others.for_each(|(_, group)| group.fill(f32::NEG_INFINITY));
    }
}

impl ExpertsConfig {
    /// The tokens of each expert, and behind them those of the shared one, for the router's scores `[tokens, experts]`,
    /// what is added to weights where experts are chosen, and the scores of the shared one `[tokens]`. Of equal scores
    /// the expert of the lower number comes first.
    pub(super) fn route(
        &self,
        mut scores: Vec<f32>,
        correction: Option<&[f32]>,
        shared: Option<Vec<f32>>,
    ) -> Vec<Routed> {
        let mut routed = vec![vec![]; self.count];
        let tokens = scores.len() / self.count.max(1);
        for (token, weights) in scores.chunks_exact_mut(self.count.max(1)).enumerate() {
            match self.routing.function {
                ScoreFunction::Softmax => softmax::in_place(weights),
                ScoreFunction::Sigmoid => weights.iter_mut().for_each(|weight| *weight = sigmoid(*weight)),
            }
            let mut choice = weights.to_vec();
            choice.iter_mut().zip(correction.unwrap_or_default()).for_each(|(choice, own)| *choice += own);
            if let Some(groups) = self.routing.groups {
                groups.mask(&mut choice);
            }
            let chosen = highest(&choice, self.per_token);
            // As transformers keeps the sum of sigmoids from zero.
            let sum = chosen.iter().map(|expert| weights[*expert]).sum::<f32>() + 1e-20;
            let sum = if self.is_normalized { sum } else { 1.0 };
            for expert in chosen {
                routed[expert].push((token, weights[expert] / sum * self.routing.factor));
            }
        }
        if self.shared.is_some() {
            routed.push(match shared {
                Some(scores) => scores.into_iter().map(sigmoid).enumerate().collect(),
                None => (0..tokens).map(|token| (token, 1.0)).collect(),
            });
        }
        routed
    }
}

impl ClampedGate {
    /// The hidden layer for rows of `x` that hold `width` elements of the gate, then `width` of `up`.
    pub(super) fn of<T: KernelElement>(self, width: usize, x: &[T]) -> Vec<T> {
        let ClampedGate { slope, limit } = self;
        let of = |(gate, up): (&T, &T)| {
            let (gate, up) = (gate.to_f32(), up.to_f32().clamp(-limit, limit));
            // NaN stays.
            let gate = if gate > limit { limit } else { gate };
            T::from_f32((up + 1.0) * gate / (1.0 + (-slope * gate).exp()))
        };
        let rows = x.chunks_exact((2 * width).max(1)).map(|row| row.split_at(width));
        rows.flat_map(|(gate, up)| gate.iter().zip(up).map(of)).collect()
    }
}

/// The rows of an expert's tokens.
pub(crate) fn rows<T: Copy>(x: &[T], width: usize, routed: &Routed) -> Vec<T> {
    routed.iter().flat_map(|(token, _)| &x[token * width..][..width]).copied().collect()
}
