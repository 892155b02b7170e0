//! The plain kernels that every engine is compared with, and that any machine can run.
//!
//! A sum runs over the stored positions in order of column, in f32. What was pruned takes no part: an infinity or NaN that meets
//! a pruned weight leaves no trace, on any engine.

use std::ops::Range;

use super::{
    dense_block::DenseBlock,
    element::KernelElement,
    strips::{ROWS, StripsRef},
};

/// `[strip, token, ROWS]` for some strips and activations `stride` apart.
pub(super) fn sparse<T: KernelElement>(
    weight: StripsRef<'_, T>,
    strips: Range<usize>,
    x: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    let weight = &weight;
    let places = strips.flat_map(|strip| x.chunks_exact(stride).map(move |x| (weight.strip(strip), x)));
    for ((strip, x), out) in places.zip(out.chunks_exact_mut(ROWS)) {
        for (row, sum) in out.iter_mut().enumerate() {
            *sum = 0.0;
            for (group, four) in x.as_chunks::<4>().0.iter().enumerate().take(strip.lines()) {
                for (position, value) in strip.kept(row, group) {
                    *sum += value.to_f32() * four[position];
                }
            }
        }
    }
}

/// `[strip, token, ROWS]` for a dense block and activations `stride` apart.
pub(super) fn dense<T: KernelElement>(block: DenseBlock<'_, T>, x: &[f32], stride: usize, out: &mut [f32]) {
    let tokens = x.len() / stride;
    for row in 0..block.rows {
        let values = &block.values[row * block.cols..][..block.cols];
        for (token, x) in x.chunks_exact(stride).enumerate() {
            out[(row / ROWS * tokens + token) * ROWS + row % ROWS] =
                values.iter().zip(x).map(|(w, x)| w.to_f32() * x).sum();
        }
    }
}

/// `[strip, token, ROWS]` for some int8 strips and activations `stride` apart.
pub(super) fn sparse_bytes(weight: StripsRef<'_, i8>, strips: Range<usize>, x: &[i8], stride: usize, out: &mut [i32]) {
    let weight = &weight;
    let places = strips.flat_map(|strip| x.chunks_exact(stride).map(move |x| (weight.strip(strip), x)));
    for ((strip, x), out) in places.zip(out.chunks_exact_mut(ROWS)) {
        for (row, sum) in out.iter_mut().enumerate() {
            *sum = 0;
            for (group, four) in x.as_chunks::<4>().0.iter().enumerate().take(2 * strip.lines()) {
                for (position, value) in strip.kept(row, group) {
                    *sum += i32::from(value) * i32::from(four[position]);
                }
            }
        }
    }
}

/// `[strip, token, ROWS]` for a dense int8 block and activations `stride` apart.
pub(super) fn dense_bytes(block: DenseBlock<'_, i8>, x: &[i8], stride: usize, out: &mut [i32]) {
    let tokens = x.len() / stride;
    for row in 0..block.rows {
        let values = &block.values[row * block.cols..][..block.cols];
        for (token, x) in x.chunks_exact(stride).enumerate() {
            out[(row / ROWS * tokens + token) * ROWS + row % ROWS] =
                values.iter().zip(x).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
        }
    }
}

/// One token's input gradient, `dx[col] += Σ_row dy[row] · W[row, col]`, added up in order of row.
pub(super) fn sparse_input_gradient<T: KernelElement>(weight: StripsRef<'_, T>, dy: &[f32], dx: &mut [f32]) {
    for (row, dy) in dy.iter().enumerate() {
        let strip = weight.strip(row / ROWS);
        for (group, four) in dx.chunks_mut(4).enumerate() {
            for (position, value) in strip.kept(row % ROWS, group) {
                // Past the last column only zeros are stored.
                if let Some(slot) = four.get_mut(position) {
                    *slot += value.to_f32() * dy;
                }
            }
        }
    }
}

/// One token's input gradient of a dense block.
pub(super) fn dense_input_gradient<T: KernelElement>(block: DenseBlock<'_, T>, dy: &[f32], dx: &mut [f32]) {
    for (row, dy) in dy.iter().enumerate() {
        for (slot, w) in dx.iter_mut().zip(&block.values[row * block.cols..][..block.cols]) {
            *slot += w.to_f32() * dy;
        }
    }
}

/// A row of `aᵀ · b`, added up in order of depth.
pub(super) fn transposed_product(a: DenseBlock<'_, f32>, b: DenseBlock<'_, f32>, row: usize, sums: &mut [f32]) {
    sums.fill(0.0);
    for depth in 0..a.rows {
        let factor = a.values[depth * a.cols + row];
        for (sum, value) in sums.iter_mut().zip(&b.values[depth * b.cols..][..b.cols]) {
            *sum += factor * value;
        }
    }
}
