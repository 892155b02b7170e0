//! AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019) in one pass over a parameter, with decay
//! of pruned elements.

use rayon::prelude::*;
use twofour::Mask;

use super::vector;
use crate::operands::{AdamWStep, PrunedDecay, SecondMoment};

/// Elements of one task; the norm and the sum of changes are taken task by task, so they do not depend on the number of
/// threads.
const TASK: usize = 1 << 14;

/// A parameter, its gradient and its moments, all of one length.
#[derive(Debug)]
pub struct AdamWSlices<'a> {
    /// The parameter.
    pub parameter: &'a mut [f32],
    /// Its gradient.
    pub gradient: &'a [f32],
    /// The first moment.
    pub first: &'a mut [f32],
    /// The second moment.
    pub second: &'a mut [f32],
}

/// The constants of a step, as every element uses them.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    scale: f32,
    /// What is left of kept and of pruned elements by decay of weights.
    left: [f32; 2],
    pruned: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    first_scale: f32,
    second_scale: f32,
    epsilon: f32,
    learning_rate: f32,
    is_frozen: bool,
    /// Of what pruned elements move by, the share of the first moment and what the sign is multiplied by.
    moment: Option<[f32; 2]>,
}

impl Numbers {
    fn of(step: &AdamWStep) -> Self {
        let AdamWStep { learning_rate, beta1, beta2, epsilon, weight_decay, gradient_scale, .. } = *step;
        // f64 powers: at large counts both are simply zero.
        let corrected = |beta: f64, number: u64| (1.0 / (1.0 - beta.powf(number as f64))) as f32;
        let (since, epsilon) = match step.second_moment {
            SecondMoment::Frozen { at } => (at, epsilon.powf(0.75)),
            _ => (step.step, epsilon),
        };
        let (pruned, off) = match step.pruned_decay {
            PrunedDecay::None => (0.0, 0.0),
            PrunedDecay::Gradient { strength } => (strength, 0.0),
            PrunedDecay::Weight { strength } => (0.0, strength),
            PrunedDecay::Moment { .. } => (0.0, 0.0),
        };
        let moment = match step.pruned_decay {
            PrunedDecay::Moment { share, strength } => Some([1.0 - share, share * strength]),
            _ => None,
        };
        Numbers {
            scale: gradient_scale,
            left: [weight_decay, weight_decay + off].map(|decay| (1.0 - learning_rate * decay) as f32),
            pruned,
            beta1: beta1 as f32,
            rest1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
            first_scale: corrected(beta1, step.step),
            second_scale: corrected(beta2, since),
            epsilon: epsilon as f32,
            learning_rate: learning_rate as f32,
            is_frozen: matches!(step.second_moment, SecondMoment::Frozen { .. }),
            moment,
        }
    }

    /// Updates one element and returns the change of its second moment.
    #[inline(always)]
    fn update(&self, is_kept: bool, p: &mut f32, g: f32, m: &mut f32, v: &mut f32) -> f32 {
        let mut g = g * self.scale;
        if !is_kept {
            g += self.pruned * *p;
        }
        *m = *m * self.beta1 + g * self.rest1;
        let (mut moved, mut followed) = (*m, g);
        if let Some([rest, pull]) = self.moment {
            if !is_kept {
                moved = rest * *m + if *p == 0.0 { 0.0 } else { pull.copysign(*p) };
            }
            followed = moved;
        }
        let before = *v;
        if !self.is_frozen {
            *v = *v * self.beta2 + followed * followed * self.rest2;
        }
        let step = moved * self.first_scale / ((*v * self.second_scale).sqrt() + self.epsilon);
        *p = *p * self.left[usize::from(!is_kept)] - step * self.learning_rate;
        (*v - before).abs()
    }
}

/// Updates a parameter, with the mask of its 2:4 layer if it has one. Returns the sum of the magnitudes of the second
/// moment's changes, or of their logarithms, where the step watches them, and otherwise 0.
///
/// The slices must have one length, which a mask has as its number of elements.
pub fn step(step: &AdamWStep, state: AdamWSlices<'_>, mask: Option<&Mask>) -> f64 {
    let numbers = Numbers::of(step);
    let AdamWSlices { parameter, gradient, first, second } = state;
    // Where nothing is done to pruned elements, the mask does not matter.
    let mask = mask.filter(|_| step.pruned_decay != PrunedDecay::None);
    let size: Option<fn(f32) -> f64> = match step.second_moment {
        SecondMoment::Watched => Some(f64::from),
        SecondMoment::WatchedByLogarithm => Some(|change| f64::from(change.max(f32::MIN_POSITIVE)).ln()),
        SecondMoment::Moving | SecondMoment::Frozen { .. } => None,
    };
    // A task of a masked parameter is a row, whose bits begin in a word of their own.
    let task = mask.map_or(TASK, |mask| mask.cols().max(1));
    let moments = first.par_chunks_mut(task).zip(second.par_chunks_mut(task));
    let tasks = parameter.par_chunks_mut(task).zip(gradient.par_chunks(task)).zip(moments).enumerate();
    let changes: Vec<f64> = tasks
        .map(|(row, ((p, g), (m, v)))| {
            let words = mask.map(|mask| mask.row_words(row));
            let mut sum = 0.0;
            vector::widest(|| match (words, size) {
                (None, None) => elements(&numbers, |_| true, |_| {}, (p, g), (m, v)),
                (Some(words), None) => elements(&numbers, |col| is_kept(words, col), |_| {}, (p, g), (m, v)),
                (words, Some(size)) => {
                    let kept = |col| words.is_none_or(|words| is_kept(words, col));
                    elements(&numbers, kept, |change| sum += size(change), (p, g), (m, v));
                }
            });
            sum
        })
        .collect();
    changes.iter().sum()
}

/// Updates a task's elements, and calls `watch` with the change of each second moment.
#[inline(always)]
fn elements(
    numbers: &Numbers,
    is_kept: impl Fn(usize) -> bool,
    mut watch: impl FnMut(f32),
    (p, g): (&mut [f32], &[f32]),
    (m, v): (&mut [f32], &mut [f32]),
) {
    for (col, ((p, g), (m, v))) in p.iter_mut().zip(g).zip(m.iter_mut().zip(v)).enumerate() {
        watch(numbers.update(is_kept(col), p, *g, m, v));
    }
}

/// Whether a bit of a row's words is set.
#[inline(always)]
pub(super) fn is_kept(words: &[u64], col: usize) -> bool {
    words[col / 64] >> (col % 64) & 1 == 1
}

/// The sum of the squares of all elements, in f64.
pub fn sum_of_squares(gradient: &[f32]) -> f64 {
    let partial = |g: &[f32]| g.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
    gradient.par_chunks(TASK).map(partial).collect::<Vec<_>>().iter().sum()
}
