//! Softmax of a row, in place.

use super::vector;

/// Replaces one row by its softmax.
#[inline(always)]
pub fn in_place(row: &mut [f32]) {
    let max = vector::max(row);
    for v in row.iter_mut() {
        *v = vector::exp(*v - max);
    }
    let scale = 1.0 / vector::sum(row, |v| v);
    for v in row.iter_mut() {
        *v *= scale;
    }
}

/// Replaces the upstream gradient of one row by the gradient for the softmax's input; `y` is the softmax.
#[inline(always)]
pub fn backward_in_place(y: &[f32], dy: &mut [f32]) {
    let mean = vector::sum2(y, dy, |y, dy| y * dy);
    for (dy, &y) in dy.iter_mut().zip(y) {
        *dy = y * (*dy - mean);
    }
}
