//! Dense weights as left factors: sixteen rows, 64 bytes of each, copied as they are. The tokens are transposed once instead.

use super::{
    super::{dense_block::DenseBlock, engine::HasAvx512, strips::ROWS},
    Factor, LINE, SUMS, TILE, TileElement, transpose,
};

/// Packs up to 16 rows of `cols` elements into tiles, from tile `first` of the depth on; what is missing is zero.
pub(super) fn pack_rows<E: TileElement>(rows: &[E], cols: usize, first: usize, tiles: &mut [u8]) {
    if cols == 0 {
        return tiles.fill(0);
    }
    let mut rows = rows.chunks_exact(cols);
    for row in 0..ROWS {
        let bytes: &[u8] = rows.next().map_or(&[], bytemuck::cast_slice);
        let mut lines = bytes.get(first * LINE..).unwrap_or(&[]).chunks(LINE);
        for tile in tiles.chunks_exact_mut(TILE) {
            let out = &mut tile[row * LINE..][..LINE];
            match lines.next() {
                // The usual case with a length that the compiler knows.
                Some(line) if line.len() == LINE => out.copy_from_slice(line),
                line => {
                    let line = line.unwrap_or(&[]);
                    out[..line.len()].copy_from_slice(line);
                    out[line.len()..].fill(0);
                }
            }
        }
    }
}

impl<E: TileElement> Factor for DenseBlock<'_, E> {
    type Element = E;

    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    /// Right factors: four bytes of depth of each of 16 tokens in a row.
    fn pack_tokens(has: HasAvx512, x: &[E], cols: usize, tiles: &mut [u8]) {
        pack_rows(x, cols, 0, tiles);
        tiles.chunks_exact_mut(TILE).for_each(|tile| transpose::transpose(has, bytemuck::cast_slice_mut(tile)));
    }

    fn fill(&self, _: HasAvx512, strip: usize, first: usize, tiles: &mut [u8]) {
        let rows = (strip * ROWS).min(self.rows)..((strip + 1) * ROWS).min(self.rows);
        pack_rows(&self.values[rows.start * self.cols..rows.end * self.cols], self.cols, first, tiles);
    }

    #[inline(always)]
    unsafe fn multiply(weights: [*const u8; 2], tokens: [*const u8; 2], depth: usize, sums: [*mut E::Sum; 2]) {
        // SAFETY: AMX is there, the tiles are configured and the pointers are valid, as the trait requires; `sums` are valid for two tiles, the second
        // of which is `SUMS` further.
        unsafe { E::multiply(weights, tokens, depth, sums.map(|sums| [sums, sums.add(SUMS)])) }
    }

    fn finish(has: HasAvx512, sums: &mut [E::Sum]) {
        transpose::transpose(has, bytemuck::cast_slice_mut(sums));
    }
}
