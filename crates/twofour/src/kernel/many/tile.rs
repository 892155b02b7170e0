//! Dense weights in tiles, and the loop that keeps a tile of products in registers.

use std::ops::Range;

use super::{Lines, ahead::Ahead};
use crate::kernel::{
    dense::Rows,
    format::KernelElement,
    vector::{Has, Vector, Work},
};

/// A block of a weight, widened: `[tile][depth, outs of a tile]`, completed with zero outputs.
#[derive(Debug, Default)]
pub(super) struct Tiles {
    data: Vec<f32>,
    outs: usize,
    depth: usize,
}

impl Tiles {
    /// Fills tile by tile: `write(first, count, lines)` has `count` outputs from `first` on, counted from the block's
    /// start, and the tile's lines, `[depth, tile]`. Outputs beyond the last are zeros.
    #[inline(always)]
    fn fill(&mut self, outs: usize, depth: usize, tile: usize, write: impl Fn(usize, usize, &mut [f32])) {
        self.outs = outs;
        self.depth = depth;
        self.data.resize(outs.next_multiple_of(tile) * depth, 0.0);
        if depth == 0 {
            return;
        }
        for (lines, first) in self.data.chunks_exact_mut(depth * tile).zip((0..).step_by(tile)) {
            let count = tile.min(outs - first);
            if count < tile {
                lines.fill(0.0);
            }
            write(first, count, lines);
        }
    }

    /// A part of a weight: outputs are rows.
    pub(super) fn fill_by_rows<V: Vector, T: KernelElement>(
        &mut self,
        weight: Rows<'_, T>,
        outs: Range<usize>,
        depth: Range<usize>,
    ) {
        self.fill(outs.len(), depth.len(), V::TILE_OUTS, |first, count, lines| {
            for r in 0..count {
                let row = &weight.values[(outs.start + first + r) * weight.cols..][depth.clone()];
                let slots = lines[r..].iter_mut().step_by(V::TILE_OUTS);
                slots.zip(row).for_each(|(slot, value)| *slot = value.to_f32());
            }
        });
    }

    /// A part of its transpose: outputs are columns.
    pub(super) fn fill_by_columns<V: Vector, T: KernelElement>(
        &mut self,
        weight: Rows<'_, T>,
        outs: Range<usize>,
        depth: Range<usize>,
    ) {
        self.fill(outs.len(), depth.len(), V::TILE_OUTS, |first, count, lines| {
            for (line, k) in lines.chunks_exact_mut(V::TILE_OUTS).zip(depth.clone()) {
                let row = &weight.values[k * weight.cols + outs.start + first..];
                // A whole line's length is known to the compiler.
                let row = if count == V::TILE_OUTS { &row[..V::TILE_OUTS] } else { &row[..count] };
                line.iter_mut().zip(row).for_each(|(slot, value)| *slot = value.to_f32());
            }
        });
    }
}

/// Adds to each line of `out`, of `vectors` registers, the products of an output with the panel.
pub(super) struct Multiply<'a> {
    pub(super) tiles: &'a Tiles,
    pub(super) panel: Lines<'a>,
    pub(super) vectors: usize,
    pub(super) out: &'a mut [f32],
}

impl Work for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, _: Has<V>) {
        // SAFETY: there is proof of the instructions.
        unsafe {
            match V::TILE_OUTS {
                6 => self.by_tiles::<V, 6>(),
                8 => self.by_tiles::<V, 8>(),
                _ => unreachable!("a tile has 6 or 8 outputs"),
            }
        }
    }
}

impl Multiply<'_> {
    /// By tiles of `R` outputs.
    ///
    /// # Safety
    /// The CPU has `V`'s instructions.
    #[inline(always)]
    unsafe fn by_tiles<V: Vector, const R: usize>(self) {
        let Self { tiles, panel: Lines { data: panel, stride, next }, vectors, out } = self;
        let mut ahead = Ahead::new(next, tiles.outs.div_ceil(R));
        assert!(panel.len() >= tiles.depth * stride && stride >= vectors * V::LANES);
        assert!(
            out.len() == tiles.outs * vectors * V::LANES
                && tiles.data.len() == tiles.outs.next_multiple_of(R) * tiles.depth
        );
        for (i, out) in out.chunks_mut(R * vectors * V::LANES).enumerate() {
            ahead.fetch::<V>();
            // SAFETY: by the assertions above the tile has `depth` lines of `R`, the panel as many of at least
            // `vectors` registers.
            unsafe {
                let tile = tiles.data.as_ptr().add(i * R * tiles.depth);
                match vectors {
                    1 => accumulate::<V, R, 1>(tile, tiles.depth, panel.as_ptr(), stride, out),
                    2 => accumulate::<V, R, 2>(tile, tiles.depth, panel.as_ptr(), stride, out),
                    3 => accumulate::<V, R, 3>(tile, tiles.depth, panel.as_ptr(), stride, out),
                    _ => unreachable!("panels are at most 3 registers wide"),
                }
            }
        }
    }
}

/// Adds one tile's products to `out`, which has up to `R` lines of `N` registers.
///
/// # Safety
/// The CPU has `V`'s instructions; `tile` has `depth` lines of `R`, `panel` as many of `N` vectors, `stride` apart.
#[inline(always)]
unsafe fn accumulate<V: Vector, const R: usize, const N: usize>(
    tile: *const f32,
    depth: usize,
    panel: *const f32,
    stride: usize,
    out: &mut [f32],
) {
    // SAFETY: the CPU has `V`'s instructions; tile and panel have `depth` lines, as this function requires; lines of
    // `out` are checked by slicing.
    unsafe {
        let mut sums = [[V::zero(); N]; R];
        for k in 0..depth {
            let mut x = [V::zero(); N];
            for (n, x) in x.iter_mut().enumerate() {
                *x = V::load(panel.add(k * stride + n * V::LANES));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let w = V::splat(*tile.add(k * R + r));
                for (sum, x) in sums.iter_mut().zip(&x) {
                    *sum = V::multiply_add(w, *x, *sum);
                }
            }
        }
        let one = V::splat(1.0);
        for (line, sums) in out.chunks_exact_mut(N * V::LANES).zip(&sums) {
            for (sum, slot) in sums.iter().zip(line.chunks_exact_mut(V::LANES)) {
                V::store(V::multiply_add(one, *sum, V::load(slot.as_ptr())), slot.as_mut_ptr());
            }
        }
    }
}
