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

use super::{build::Parts, feed_forward::HiddenLayer, linear::Linear, passes::widened};
use crate::{
    Result,
    cpu::softmax,
    model::config::{ClampedGate, ExpertsConfig, TransformerConfig},
};

/// The router and the experts of a layer.
#[derive(Debug)]
pub(crate) struct Experts<T: KernelElement> {
    config: ExpertsConfig,
    router: Linear<T>,
    experts: Vec<HiddenLayer<T>>,
    shared: Option<Shared<T>>,
}

/// The expert that gets every token, with what scores it.
#[derive(Debug)]
struct Shared<T: KernelElement> {
    gate: Linear<T>,
    layer: HiddenLayer<T>,
}

/// Tokens with the weights that an expert's outputs have for them, in the order of the tokens.
pub(crate) type Routed = Vec<(usize, f32)>;

impl<T: KernelElement> Experts<T> {
    /// Those whose parts' names begin with `at`.
    pub(super) fn build(
        config: &TransformerConfig,
        experts: &ExpertsConfig,
        parts: &impl Parts<T>,
        at: &str,
    ) -> Result<Self> {
        let layer = |name: String, width: usize| HiddenLayer::build(config, parts, &format!("{at}.{name}"), width);
        let shared = |width: usize| -> Result<Shared<T>> {
            let gate = parts.linear(&format!("{at}.shared_gate"), (1, config.width))?;
            Ok(Shared { gate, layer: layer("shared".to_owned(), width)? })
        };
        let all = (0..experts.count).map(|expert| layer(format!("experts.{expert}"), experts.hidden));
        Ok(Experts {
            config: experts.clone(),
            router: parts.linear(&format!("{at}.router"), (experts.count, config.width))?,
            experts: all.collect::<Result<_>>()?,
            shared: experts.shared.map(shared).transpose()?,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        let shared = self.shared.as_ref().map_or(0, |shared| shared.gate.bytes() + shared.layer.bytes());
        self.router.bytes() + self.experts.iter().map(HiddenLayer::bytes).sum::<usize>() + shared
    }

    /// [`ExpertsConfig::route`] for inputs `x: [tokens, width]`.
    pub(crate) fn route(&self, x: &[T], tokens: usize) -> Result<Vec<Routed>> {
        let scores = |layer: &Linear<T>| layer.forward(x, tokens, Activation::Identity).map(|scores| widened(&scores));
        let shared = self.shared.as_ref().map(|shared| scores(&shared.gate)).transpose()?;
        Ok(self.config.route(scores(&self.router)?, shared))
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

impl ExpertsConfig {
    /// The tokens of each expert, and behind them those of the shared one, for the router's scores `[tokens, experts]`
    /// and the scores of the shared one `[tokens]`. Of equal scores the expert of the lower number comes first.
    pub(super) fn route(&self, mut scores: Vec<f32>, shared: Option<Vec<f32>>) -> Vec<Routed> {
        let mut routed = vec![vec![]; self.count];
        for (token, scores) in scores.chunks_exact_mut(self.count.max(1)).enumerate() {
            softmax::in_place(scores);
            let mut order: Vec<usize> = (0..scores.len()).collect();
            order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            order.truncate(self.per_token);
            let sum: f32 = if self.is_normalized { order.iter().map(|expert| scores[*expert]).sum() } else { 1.0 };
            order.iter().for_each(|expert| routed[*expert].push((token, scores[*expert] / sum)));
        }
        let sigmoid = |score: f32| 1.0 / (1.0 + (-score).exp());
        routed.extend(shared.map(|scores| scores.into_iter().map(sigmoid).enumerate().collect()));
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
