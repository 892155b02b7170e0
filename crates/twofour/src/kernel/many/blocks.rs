//! A block-sparse weight and many tokens: the tiles of a dense weight, of the blocks that are stored.

use super::{Panels, column_blocks, expected, panels::Lines, tile, unpack};
use crate::kernel::{
    block_sparse::Blocks,
    epilogue::Epilogue,
    format::KernelElement,
    scratch::Scratch,
    share::{share_expecting, threads},
    vector::{Has, Vector, Work},
};

/// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, cols]`, `y` is `[tokens, rows]` and not empty.
pub(in crate::kernel) struct BlockProduct<'a, T> {
    pub(in crate::kernel) weight: Blocks<'a, T>,
    pub(in crate::kernel) x: &'a [T],
    pub(in crate::kernel) epilogue: Epilogue<'a>,
    pub(in crate::kernel) y: &'a mut [T],
}

impl<T: KernelElement> Work for BlockProduct<'_, T> {
    type Output = ();

    // Only the loops inside need the instructions.
    #[inline(never)]
    fn run<V: Vector>(self, has: Has<V>) {
        let Self { weight, x, epilogue, y } = self;
        let (outs, depth) = (weight.rows, weight.cols);
        // Whole rows of blocks; a few parts per thread even out what else the machine is doing.
        let block_rows = weight.block_rows().div_ceil(4 * threads()).min((super::OUTS / weight.height()).max(1));
        let block = block_rows * weight.height();
        for (i, y) in y.chunks_mut(super::TOKENS * outs).enumerate() {
            let tokens = y.len() / outs;
            let x = &x[i * super::TOKENS * depth..][..tokens * depth];
            let panels = Panels::pack(x, tokens, depth, V::LANES, V::TILES[0]);
            share_expecting(
                expected(outs, weight.mean_depth(), tokens),
                column_blocks(y, outs, block).into_iter().enumerate(),
                || (super::Tiles::default(), Scratch::take(block.min(outs) * panels.padded_tokens())),
                |(tiles, products), (part, mut y)| {
                    let cols = y.cols();
                    let products = &mut products[..cols.len() * panels.padded_tokens()];
                    products.fill(0.0);
                    for block_row in part * block_rows..((part + 1) * block_rows).min(weight.block_rows()) {
                        let above = block_row * weight.height() - cols.start;
                        for (rows, columns) in weight.of_row(block_row) {
                            for from in (0..columns.len()).step_by(V::TILES[1]) {
                                let depth = from..(from + V::TILES[1]).min(columns.len());
                                let lines = columns.start + depth.start..columns.start + depth.end;
                                tiles.fill_by_rows::<V, T>(rows, 0..rows.rows, depth);
                                for (i, panel) in panels.iter().enumerate() {
                                    let out = &mut products[cols.len() * panel.first..][..cols.len() * panel.width];
                                    let out = &mut out[above * panel.width..][..rows.rows * panel.width];
                                    let data = panels.lines(i, &lines);
                                    let panel_lines = Lines { data, stride: panels.stride(), next: &[] };
                                    let vectors = panel.width / V::LANES;
                                    has.run(tile::Multiply { tiles, panel: panel_lines, vectors, out });
                                }
                            }
                        }
                    }
                    unpack(products, &panels, epilogue, &mut y);
                },
            );
        }
    }
}
