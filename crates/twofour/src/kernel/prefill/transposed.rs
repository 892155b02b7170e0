//! `c = aᵀ · b`, where both factors are K-major as they lie.
//!
//! Panels are columns of `b`, tiles are columns of `a`. Both are filled from runs of a row, and a line of products is part of a row of
//! `c`, so nothing is transposed.

use std::ops::Range;

use super::{
    super::{
        dense_block::DenseBlock,
        scratch::Scratch,
        share::{share_expecting, threads},
        transposed_product::StoreRow,
    },
    ALIGNMENT, Kernels, OUTS, Panels, expected, multiply_block,
    tile::{Columns, Tiles},
};

/// Columns of `b` in panels at a time: bounds the memory for panels and products. Whole panels of three vectors of sixteen and of two of
/// eight.
const COLUMNS: usize = 528;

/// `aᵀ · b`, stored by `store`; see [`super::super::transposed_product::transposed_product`]. `c` is not empty.
pub(super) fn transposed_product<V: Kernels, C: Send>(
    has: V::Has,
    (a, b): (DenseBlock<'_, f32>, DenseBlock<'_, f32>),
    store: impl StoreRow<C>,
    c: &mut [C],
) {
    let factor = Columns(a);
    let (rows, cols) = (a.cols, b.cols);
    // A few blocks per thread even out what else the machine is doing.
    let block = rows.div_ceil(4 * threads()).next_multiple_of(ALIGNMENT).min(OUTS);
    for first in (0..cols).step_by(COLUMNS) {
        let part = first..(first + COLUMNS).min(cols);
        let panels = Panels::of_columns(b, part.clone(), V::LANES, V::TILE_VECTORS);
        share_expecting(
            expected(rows, a.rows, part.len()),
            c.chunks_mut(block * cols).enumerate(),
            || (Tiles::default(), Scratch::take(block * panels.padded_tokens())),
            |(tiles, products), (i, c)| {
                let outs: Range<usize> = i * block..i * block + c.len() / cols;
                let products = &mut products[..outs.len() * panels.padded_tokens()];
                multiply_block::<V, _>(has, factor, outs.clone(), &panels, tiles, products);
                for panel in panels.iter() {
                    let lines = &mut products[outs.len() * panel.first..][..outs.len() * panel.width];
                    let width = panel.width.min(part.len() - panel.first);
                    let col = part.start + panel.first;
                    for ((row, line), c) in
                        outs.clone().zip(lines.chunks_exact_mut(panel.width)).zip(c.chunks_mut(cols))
                    {
                        store(row, col, &mut line[..width], &mut c[col..][..width]);
                    }
                }
            },
        );
    }
}
