//! The loss of a classifier over class indices, fused with its softmax.

use rayon::prelude::*;

use super::{rows, softmax, vector};

/// The sum of `-log softmax(logits)[target]` over the rows of `logits: [rows, classes]`, in nats. Targets must be below
/// `classes`, one for each row.
pub fn loss(logits: &[f32], classes: usize, targets: &[u32]) -> f64 {
    let row_loss = |(row, &target): (&[f32], &u32)| {
        vector::widest(|| {
            let max = vector::max(row);
            vector::sum(row, |v| vector::exp(v - max)).ln() + max - row[target as usize]
        })
    };
    let losses: Vec<f32> = logits.par_chunks(classes.max(1)).zip(targets).with_min_len(32).map(row_loss).collect();
    losses.iter().map(|&loss| f64::from(loss)).sum()
}

/// Overwrites `logits` with their gradient, `softmax - one_hot(target)`, times `scale`.
pub fn gradient_in_place(logits: &mut [f32], classes: usize, targets: &[u32], scale: f32) {
    rows::for_each(logits, classes, |first, rows| {
        vector::widest(|| {
            for (row, &target) in rows.chunks_exact_mut(classes).zip(&targets[first..]) {
                softmax::in_place(row);
                row[target as usize] -= 1.0;
                row.iter_mut().for_each(|v| *v *= scale);
            }
        });
    });
}
