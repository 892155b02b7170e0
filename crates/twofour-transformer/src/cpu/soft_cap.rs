//! Scores that are bounded: `cap · tanh(score / cap)`.

use super::{rows, vector};

/// Returns `tanh(x)`.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + vector::exp(2.0 * x))
}

/// `y = cap · tanh(x / cap)`.
pub fn forward(cap: f32, x: &[f32], y: &mut [f32]) {
    rows::for_each(y, 1, |first, y| {
        vector::widest(|| y.iter_mut().zip(&x[first..]).for_each(|(y, x)| *y = cap * tanh(x / cap)));
    });
}

/// `dy ← dy · (1 - tanh(x / cap)²)`.
pub fn gradient_in_place(cap: f32, x: &[f32], dy: &mut [f32]) {
    rows::for_each(dy, 1, |first, dy| {
        vector::widest(|| {
            dy.iter_mut().zip(&x[first..]).for_each(|(dy, x)| {
                let t = tanh(x / cap);
                *dy *= 1.0 - t * t;
            });
        });
    });
}
