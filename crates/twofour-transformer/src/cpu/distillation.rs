//! The loss of a student over class indices, fused with both softmaxes.

use rayon::prelude::*;

use super::vector;
use crate::DistillationWeights;

/// The sum of a student's losses over the rows of `logits` and `teacher`, both `[rows, classes]`. Overwrites `logits`
/// with their gradient times `scale`. Targets must be below `classes`, one for each row.
pub fn loss_and_gradient(
    weights: DistillationWeights,
    classes: usize,
    (logits, teacher): (&mut [f32], &[f32]),
    targets: &[u32],
    scale: f32,
) -> f64 {
    let DistillationWeights { divergence, cross_entropy } = weights;
    let (of_student, of_teacher) = ((divergence + cross_entropy) * scale, divergence * scale);
    let row = |((logits, teacher), &target): ((&mut [f32], &[f32]), &u32)| {
        vector::widest(|| {
            let (own, taught) = (log_sum(logits), log_sum(teacher));
            let distance = vector::sum2(teacher, logits, |teacher, logit| {
                let log = teacher - taught;
                // What the teacher rules out counts for nothing.
                if log == f32::NEG_INFINITY { 0.0 } else { vector::exp(log) * (log - (logit - own)) }
            });
            let missed = own - logits[target as usize];
            for (logit, teacher) in logits.iter_mut().zip(teacher) {
                *logit = of_student * vector::exp(*logit - own) - of_teacher * vector::exp(teacher - taught);
            }
            logits[target as usize] -= cross_entropy * scale;
            part(divergence, distance) + part(cross_entropy, missed)
        })
    };
    let rows = logits.par_chunks_mut(classes.max(1)).zip(teacher.par_chunks(classes.max(1))).zip(targets);
    let losses: Vec<f32> = rows.map(row).collect();
    losses.iter().map(|&loss| f64::from(loss)).sum()
}

/// A weighted part of the loss; one without a weight may be infinite.
#[inline(always)]
fn part(weight: f32, loss: f32) -> f32 {
    if weight == 0.0 { 0.0 } else { weight * loss }
}

/// The logarithm of the sum of the exponentials of a row.
#[inline(always)]
fn log_sum(row: &[f32]) -> f32 {
    let most = vector::max(row);
    most + vector::sum(row, |value| vector::exp(value - most)).ln()
}
