//! `c = aᵀ · b`, where both factors are K-major as they lie.
//!
//! Panels are columns of `b`, tiles are columns of `a`. Both are filled from runs of a row, and a line of products is
//! part of a row of `c`, so nothing is transposed.

use std::ops::Range;

use super::{ALIGNMENT, Block, Factor, OUTS, Panels, expected, multiply_block};
use crate::kernel::{
    dense::Rows,
    scratch::Scratch,
    share::{share_expecting, threads},
    vector::{Has, Vector, Work},
};

/// Columns of `b` in panels at a time: bounds the memory for panels and products. Whole panels of three vectors of
/// sixteen and of two of eight.
const COLUMNS: usize = 528;

/// `aᵀ · b`, stored by `store`; see [`transposed_product`](crate::kernel::transposed_product). `c` is not empty.
pub(in crate::kernel) struct TransposedProduct<'a, C, S> {
    pub(in crate::kernel) a: Rows<'a, f32>,
    pub(in crate::kernel) b: Rows<'a, f32>,
    pub(in crate::kernel) store: S,
    pub(in crate::kernel) c: &'a mut [C],
}

impl<C: Send, S: Fn(usize, usize, &mut [f32], &mut [C]) + Sync> Work for TransposedProduct<'_, C, S> {
    type Output = ();

    // Only the loops inside need the instructions.
    #[inline(never)]
    fn run<V: Vector>(self, has: Has<V>) {
        let Self { a, b, store, c } = self;
        let factor = Factor::Columns(a);
        let (rows, cols) = (a.cols, b.cols);
        // A few blocks per thread even out what else the machine is doing.
        let block = rows.div_ceil(4 * threads()).next_multiple_of(ALIGNMENT).min(OUTS);
        for first in (0..cols).step_by(COLUMNS) {
            let part = first..(first + COLUMNS).min(cols);
            let panels = Panels::of_columns(b, part.clone(), V::LANES, V::TILES[0]);
            share_expecting(
                expected(rows, a.rows, part.len()),
                c.chunks_mut(block * cols).enumerate(),
                || (Block::default(), Scratch::take(block * panels.padded_tokens())),
                |(prepared, products), (i, c)| {
                    let outs: Range<usize> = i * block..i * block + c.len() / cols;
                    let products = &mut products[..outs.len() * panels.padded_tokens()];
                    multiply_block(has, factor, outs.clone(), &panels, prepared, products);
                    for panel in panels.iter() {
                        let lines = &mut products[outs.len() * panel.first..][..outs.len() * panel.width];
                        let width = panel.width.min(part.len() - panel.first);
                        let col = part.start + panel.first;
                        let rows = outs.clone().zip(lines.chunks_exact_mut(panel.width)).zip(c.chunks_mut(cols));
                        for ((row, line), c) in rows {
                            store(row, col, &mut line[..width], &mut c[col..][..width]);
                        }
                    }
                },
            );
        }
    }
}
