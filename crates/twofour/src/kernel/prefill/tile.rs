//! Dense weights in tiles, and the kernel that keeps a tile of products in registers.

use std::ops::Range;

use super::{
    super::{dense_block::DenseBlock, element::KernelElement, vector::Vector},
    Factor, Kernels, Lines,
    ahead::Ahead,
};

/// A block of a weight, widened: `[tile][depth, outs of a tile]`, completed with zero outputs.
#[derive(Debug, Default)]
pub(super) struct Tiles {
    data: Vec<f32>,
    outs: usize,
    depth: usize,
}

impl Tiles {
    /// Fills line by line: `write(first, k, line)` has the outputs from `first` on, at depth `k`, both counted from the block's start.
    #[inline(always)]
    fn fill(&mut self, outs: usize, depth: usize, tile: usize, write: impl Fn(usize, usize, &mut [f32])) {
        self.outs = outs;
        self.depth = depth;
        self.data.clear();
        self.data.resize(outs.next_multiple_of(tile) * depth, 0.0);
        if depth == 0 {
            return;
        }
        for (data, first) in self.data.chunks_exact_mut(depth * tile).zip((0..).step_by(tile)) {
            for (k, line) in data.chunks_exact_mut(tile).enumerate() {
                // A whole line's length is known to the compiler.
                if first + tile <= outs { write(first, k, line) } else { write(first, k, &mut line[..outs - first]) }
            }
        }
    }
}

/// The weight itself: outputs are rows.
#[derive(Debug)]
pub(super) struct Rows<'a, T>(pub DenseBlock<'a, T>);

/// Its transpose: outputs are columns.
#[derive(Debug)]
pub(super) struct Columns<'a, T>(pub DenseBlock<'a, T>);

impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Rows<'_, T> {}
impl<T> Clone for Columns<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Columns<'_, T> {}

impl<T: KernelElement> Factor for Rows<'_, T> {
    type Block = Tiles;

    fn shape<V: Kernels>() -> (usize, usize) {
        (V::TILE_VECTORS, V::TILE_DEPTH)
    }

    fn outs(&self) -> usize {
        self.0.rows
    }

    fn depth(&self) -> usize {
        self.0.cols
    }

    fn prepare<V: Kernels>(&self, _: V::Has, outs: Range<usize>, depth: Range<usize>, _: usize, tiles: &mut Tiles) {
        let (values, cols) = (self.0.values, self.0.cols);
        tiles.fill(outs.len(), depth.len(), V::TILE_OUTS, |first, k, line| {
            let rows = outs.start + first..;
            line.iter_mut().zip(rows).for_each(|(slot, row)| *slot = values[row * cols + depth.start + k].to_f32());
        });
    }

    fn fetch(&self, _: Range<usize>, _: Range<usize>, _: usize, _: usize) {}

    unsafe fn multiply<V: Kernels>(tiles: &Tiles, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: the CPU has `V`'s instructions and the tiles are of this panel's depth, as the trait requires.
        unsafe { V::multiply_tiles(tiles, panel, vectors, out) }
    }
}

impl<T: KernelElement> Factor for Columns<'_, T> {
    type Block = Tiles;

    fn shape<V: Kernels>() -> (usize, usize) {
        (V::TILE_VECTORS, V::TILE_DEPTH)
    }

    fn outs(&self) -> usize {
        self.0.cols
    }

    fn depth(&self) -> usize {
        self.0.rows
    }

    fn prepare<V: Kernels>(&self, _: V::Has, outs: Range<usize>, depth: Range<usize>, _: usize, tiles: &mut Tiles) {
        let (values, cols) = (self.0.values, self.0.cols);
        tiles.fill(outs.len(), depth.len(), V::TILE_OUTS, |first, k, line| {
            let row = &values[(depth.start + k) * cols + outs.start + first..][..line.len()];
            line.iter_mut().zip(row).for_each(|(slot, value)| *slot = value.to_f32());
        });
    }

    fn fetch(&self, _: Range<usize>, _: Range<usize>, _: usize, _: usize) {}

    unsafe fn multiply<V: Kernels>(tiles: &Tiles, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: the CPU has `V`'s instructions and the tiles are of this panel's depth, as the trait requires.
        unsafe { V::multiply_tiles(tiles, panel, vectors, out) }
    }
}

/// Adds to each line of `out`, of `vectors` vectors, the products of an output with the panel; tiles have `R` outputs.
///
/// # Safety
/// The CPU has `V`'s instructions; the tiles were filled for `R` outputs each.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector, const R: usize>(
    tiles: &Tiles,
    panel: Lines<'_>,
    vectors: usize,
    out: &mut [f32],
) {
    let Lines { data: panel, stride, next } = panel;
    let mut ahead = Ahead::new(next, tiles.outs.div_ceil(R));
    assert!(panel.len() >= tiles.depth * stride && stride >= vectors * V::LANES);
    assert!(
        out.len() == tiles.outs * vectors * V::LANES
            && tiles.data.len() == tiles.outs.next_multiple_of(R) * tiles.depth
    );
    for (i, out) in out.chunks_mut(R * vectors * V::LANES).enumerate() {
        ahead.fetch();
        // SAFETY: by the assertions above the tile has `depth` lines of `R`, the panel as many of at least `vectors` vectors.
        unsafe {
            let tile = tiles.data.as_ptr().add(i * R * tiles.depth);
            match vectors {
                1 => accumulate::<V, R, 1>(tile, tiles.depth, panel.as_ptr(), stride, out),
                2 => accumulate::<V, R, 2>(tile, tiles.depth, panel.as_ptr(), stride, out),
                3 => accumulate::<V, R, 3>(tile, tiles.depth, panel.as_ptr(), stride, out),
                _ => unreachable!("panels are at most TILE_VECTORS wide"),
            }
        }
    }
}

/// Adds one tile's products to `out`, which has up to `R` lines of `N` vectors.
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
    // SAFETY: the CPU has `V`'s instructions; tile and panel have `depth` lines, as this function requires; lines of `out` are checked by slicing.
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
                    *sum = w.multiply_add(*x, *sum);
                }
            }
        }
        let one = V::splat(1.0);
        for (line, sums) in out.chunks_exact_mut(N * V::LANES).zip(&sums) {
            for (sum, slot) in sums.iter().zip(line.chunks_exact_mut(V::LANES)) {
                one.multiply_add(*sum, V::load(slot.as_ptr())).store(slot.as_mut_ptr());
            }
        }
    }
}
