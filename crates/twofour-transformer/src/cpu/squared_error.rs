//! The error of rows that are to be others, and its gradient.

use rayon::prelude::*;

use super::vector;
use crate::ErrorMeasure;

/// The sum over the rows of `x` and `target`, both `[rows, width]`, of `weight` times their error. Writes its gradient
/// for `x`, times `scale`, to `dx`.
pub fn loss_and_gradient(
    measure: ErrorMeasure,
    width: usize,
    (x, target): (&[f32], &[f32]),
    (weight, scale): (f32, f32),
    dx: &mut [f32],
) -> f64 {
    let width = width.max(1);
    let row = |((x, target), dx): ((&[f32], &[f32]), &mut [f32])| {
        vector::widest(|| {
            let error = vector::sum2(x, target, |x, target| (x - target) * (x - target));
            let factor = match measure {
                ErrorMeasure::Squared => weight,
                ErrorMeasure::RelativeSquared => match vector::sum(target, |value| value * value) {
                    0.0 => 0.0,
                    size => weight / size,
                },
            };
            for ((dx, x), target) in dx.iter_mut().zip(x).zip(target) {
                *dx = 2.0 * factor * scale * (x - target);
            }
            error * factor
        })
    };
    let rows = x.par_chunks(width).zip(target.par_chunks(width)).zip(dx.par_chunks_mut(width));
    let errors: Vec<f32> = rows.with_min_len(8).map(row).collect();
    errors.iter().map(|&error| f64::from(error)).sum()
}
