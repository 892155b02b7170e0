//! The scores of attention, and the weights that they become.

use super::{alibi::Slopes, relative::RelativePositions};
use crate::{
    cpu::{softmax, vector},
    model::config::TransformerConfig,
};

/// What is added to the scores of attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Added<'a> {
    pub(super) relative: Option<&'a RelativePositions>,
    /// The score of each head's sink.
    pub(super) sinks: Option<&'a [f32]>,
    /// The slopes of ALiBi.
    pub(super) slopes: Option<&'a Slopes>,
}

/// The weights of a query's scores, beside that of its head's sink.
#[inline(always)]
fn weigh(scores: &mut [f32], sink: Option<f32>) {
    let Some(sink) = sink else { return softmax::in_place(scores) };
    let most = scores.iter().copied().fold(sink, f32::max);
    let mut sum = vector::exp(sink - most);
    for score in scores.iter_mut() {
        *score = vector::exp(*score - most);
        sum += *score;
    }
    scores.iter_mut().for_each(|score| *score /= sum);
}

/// What products of queries and keys become on their way to weights.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scores<'a> {
    /// What they are multiplied by.
    pub(super) scale: f32,
    soft_cap: Option<f32>,
    added: Added<'a>,
}

impl<'a> Scores<'a> {
    pub(super) fn of(config: &TransformerConfig, added: Added<'a>) -> Self {
        Scores { scale: config.score_scale(), soft_cap: config.attention.soft_cap, added }
    }

    /// The weights of the scores of a head's query at a position, for the keys from `first` on.
    #[inline(always)]
    pub(super) fn weigh(&self, (head, position): (usize, usize), first: usize, scores: &mut [f32]) {
        if let Some(slopes) = self.added.slopes {
            slopes.add((head, position), first, scores);
        }
        bound(scores, self.soft_cap);
        weigh(scores, self.added.sinks.and_then(|sinks| sinks.get(head).copied()));
    }
}

/// Bounds scores smoothly: `cap * tanh(score / cap)`.
#[inline(always)]
pub(super) fn bound(scores: &mut [f32], cap: Option<f32>) {
    if let Some(cap) = cap {
        let twice = 2.0 / cap;
        scores.iter_mut().for_each(|score| *score = cap * (1.0 - 2.0 / (vector::exp(*score * twice) + 1.0)));
    }
}
