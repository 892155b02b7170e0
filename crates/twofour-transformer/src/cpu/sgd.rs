//! Stochastic gradient descent with momentum in one pass over a parameter, with decay of pruned elements (SR-STE: Zhou
//! et al., ICLR 2021).

use rayon::prelude::*;
use twofour::Mask;

use super::{adamw::is_kept, vector};
use crate::operands::{PrunedDecay, SgdStep};

/// Elements of one task.
const TASK: usize = 1 << 14;

/// A parameter, its gradient and its momentum, all of one length.
#[derive(Debug)]
pub struct SgdSlices<'a> {
    /// The parameter.
    pub parameter: &'a mut [f32],
    /// Its gradient.
    pub gradient: &'a [f32],
    /// The momentum.
    pub momentum: &'a mut [f32],
}

/// The constants of a step, as every element uses them.
#[derive(Debug, Clone, Copy)]
struct Numbers {
    scale: f32,
    weight_decay: f32,
    /// Added to the gradient of pruned elements, and what is left of them by decay of weights.
    pruned: f32,
    left: f32,
    momentum: f32,
    learning_rate: f32,
}

impl Numbers {
    fn of(step: &SgdStep) -> Self {
        let (pruned, left) = match step.pruned_decay {
            // Gradient descent has no second moment; engines refuse the latter.
            PrunedDecay::None | PrunedDecay::Moment { .. } => (0.0, 1.0),
            PrunedDecay::Gradient { strength } => (strength, 1.0),
            PrunedDecay::Weight { strength } => (0.0, (1.0 - step.learning_rate * strength) as f32),
        };
        Numbers {
            scale: step.gradient_scale,
            weight_decay: step.weight_decay as f32,
            pruned,
            left,
            momentum: step.momentum as f32,
            learning_rate: step.learning_rate as f32,
        }
    }

    #[inline(always)]
    fn update(&self, is_kept: bool, p: &mut f32, g: f32, m: &mut f32) {
        let mut g = g * self.scale;
        g += self.weight_decay * *p;
        if !is_kept {
            g += self.pruned * *p;
        }
        *m = *m * self.momentum + g;
        let left = if is_kept { *p } else { *p * self.left };
        *p = left - *m * self.learning_rate;
    }
}

/// Updates a parameter, with the mask of its 2:4 layer if it has one.
///
/// The slices must have one length, which a mask has as its number of elements.
pub fn step(step: &SgdStep, state: SgdSlices<'_>, mask: Option<&Mask>) {
    let numbers = Numbers::of(step);
    let SgdSlices { parameter, gradient, momentum } = state;
    let mask = mask.filter(|_| step.pruned_decay != PrunedDecay::None);
    // A task of a masked parameter is a row, whose bits begin in a word of their own.
    let task = mask.map_or(TASK, |mask| mask.cols().max(1));
    let tasks = parameter.par_chunks_mut(task).zip(gradient.par_chunks(task)).zip(momentum.par_chunks_mut(task));
    tasks.enumerate().for_each(|(row, ((p, g), m))| {
        let words = mask.map(|mask| mask.row_words(row));
        vector::widest(|| match words {
            None => elements(&numbers, |_| true, p, g, m),
            Some(words) => elements(&numbers, |col| is_kept(words, col), p, g, m),
        });
    });
}

#[inline(always)]
fn elements(numbers: &Numbers, is_kept: impl Fn(usize) -> bool, p: &mut [f32], g: &[f32], m: &mut [f32]) {
    for (col, ((p, g), m)) in p.iter_mut().zip(g).zip(m).enumerate() {
        numbers.update(is_kept(col), p, *g, m);
    }
}
