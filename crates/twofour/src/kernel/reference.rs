//! The plain kernels that every engine is compared with, and that any machine can run.
//!
//! A sum runs over the stored positions in order of column, in f32. What was pruned takes no part: an infinity or NaN that meets
//! a pruned weight leaves no trace, on any engine.

use super::{
    KernelElement,
    decode::{DenseBlock, SparseBlock},
};
use crate::compressed::code;

/// `out[row * tokens + token]` for a compressed block.
pub(super) fn sparse<T: KernelElement>(block: SparseBlock<'_, T>, x: &[Vec<f32>], out: &mut [f32]) {
    let tokens = x.len();
    for row in 0..block.rows {
        let values = &block.values[row * block.row_values..][..block.row_values];
        let meta = &block.meta[row * block.row_words..][..block.row_words];
        for (token, x) in x.iter().enumerate() {
            let mut sum = 0.0;
            for (group, (pair, four)) in values.as_chunks::<2>().0.iter().zip(x.chunks(4)).enumerate() {
                let (first, second) = code::positions((meta[group / 8] >> (group % 8 * 4) & 15) as u8);
                // Padding past the last column holds zeros only.
                for (position, value) in [first, second].into_iter().zip(pair) {
                    sum += value.to_f32() * four.get(position).copied().unwrap_or(0.0);
                }
            }
            out[row * tokens + token] = sum;
        }
    }
}

/// `out[row * tokens + token]` for a dense block.
pub(super) fn dense<T: KernelElement>(block: DenseBlock<'_, T>, x: &[Vec<f32>], out: &mut [f32]) {
    let tokens = x.len();
    for row in 0..block.rows {
        let values = &block.values[row * block.cols..][..block.cols];
        for (token, x) in x.iter().enumerate() {
            out[row * tokens + token] = values.iter().zip(x).map(|(w, x)| w.to_f32() * x).sum();
        }
    }
}

/// `out[row * tokens + token]` of a compressed int8 block.
pub(super) fn sparse_bytes(block: SparseBlock<'_, i8>, x: &[Vec<i8>], out: &mut [i32]) {
    let tokens = x.len();
    for row in 0..block.rows {
        let values = &block.values[row * block.row_values..][..block.row_values];
        let meta = &block.meta[row * block.row_words..][..block.row_words];
        for (token, x) in x.iter().enumerate() {
            let mut sum = 0;
            for (group, (pair, four)) in values.as_chunks::<2>().0.iter().zip(x.chunks(4)).enumerate() {
                let (first, second) = code::positions((meta[group / 8] >> (group % 8 * 4) & 15) as u8);
                for (position, value) in [first, second].into_iter().zip(pair) {
                    sum += i32::from(*value) * four.get(position).map_or(0, |x| i32::from(*x));
                }
            }
            out[row * tokens + token] = sum;
        }
    }
}

/// `out[row * tokens + token]` of a dense int8 block.
pub(super) fn dense_bytes(block: DenseBlock<'_, i8>, x: &[Vec<i8>], out: &mut [i32]) {
    let tokens = x.len();
    for row in 0..block.rows {
        let values = &block.values[row * block.cols..][..block.cols];
        for (token, x) in x.iter().enumerate() {
            out[row * tokens + token] = values.iter().zip(x).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
        }
    }
}

/// One token's input gradient, `dx[col] += Σ_row dy[row] · W[row, col]`, added up in order of row.
pub(super) fn sparse_input_gradient<T: KernelElement>(block: SparseBlock<'_, T>, dy: &[f32], dx: &mut [f32]) {
    for (row, dy) in dy.iter().enumerate() {
        let values = &block.values[row * block.row_values..][..block.row_values];
        let meta = &block.meta[row * block.row_words..][..block.row_words];
        for (group, (pair, four)) in values.as_chunks::<2>().0.iter().zip(dx.chunks_mut(4)).enumerate() {
            let (first, second) = code::positions((meta[group / 8] >> (group % 8 * 4) & 15) as u8);
            for (position, value) in [first, second].into_iter().zip(pair) {
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
