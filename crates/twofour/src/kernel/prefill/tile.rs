//! Dense weights in tiles, and the kernel that keeps a tile of products in registers.

use std::ops::Range;

use super::{
    super::{
        KernelElement,
        decode::{DenseBlock, vector::Vector},
    },
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
    /// Makes room for a block with tiles of so many outputs; everything in it has to be written.
    fn reset(&mut self, outs: usize, depth: usize, tile: usize) {
        self.outs = outs;
        self.depth = depth;
        self.data.resize(outs.next_multiple_of(tile) * depth, 0.0);
    }

    /// Each tile's lines with its first output, and how many outputs it has.
    fn tiles<const R: usize>(&mut self) -> impl Iterator<Item = (usize, usize, &mut [[f32; R]])> {
        let outs = self.outs;
        let tiles = self.data.as_chunks_mut::<R>().0.chunks_exact_mut(self.depth.max(1));
        tiles.zip((0..).step_by(R)).map(move |(lines, first)| (first, R.min(outs - first), lines))
    }
}

/// Fills with rows of `values`, `[_, cols]`, which become outputs.
#[inline(always)]
pub(super) fn fill_from_rows<T: KernelElement, const R: usize>(
    values: &[T],
    cols: usize,
    rows: Range<usize>,
    depth: Range<usize>,
    tiles: &mut Tiles,
) {
    tiles.reset(rows.len(), depth.len(), R);
    for (first, count, lines) in tiles.tiles::<R>() {
        let row = |row: usize| &values[(rows.start + first + row) * cols..][depth.clone()];
        if count == R {
            let sources: [&[T]; R] = std::array::from_fn(row);
            for (k, line) in lines.iter_mut().enumerate() {
                *line = std::array::from_fn(|row| sources[row][k].to_f32());
            }
        } else {
            for (k, line) in lines.iter_mut().enumerate() {
                *line = std::array::from_fn(|out| if out < count { row(out)[k].to_f32() } else { 0.0 });
            }
        }
    }
}

/// Fills with columns of `values`, `[_, cols]`, which become outputs.
#[inline(always)]
pub(super) fn fill_from_columns<T: KernelElement, const R: usize>(
    values: &[T],
    cols: usize,
    columns: Range<usize>,
    depth: Range<usize>,
    tiles: &mut Tiles,
) {
    tiles.reset(columns.len(), depth.len(), R);
    for (first, count, lines) in tiles.tiles::<R>() {
        for (line, row) in lines.iter_mut().zip(depth.clone()) {
            let source = &values[row * cols + columns.start + first..][..count];
            *line = match source.as_array::<R>() {
                Some(source) => source.map(|value| value.to_f32()),
                None => std::array::from_fn(|out| source.get(out).map_or(0.0, |value| value.to_f32())),
            };
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

    fn prepare<V: Kernels>(&self, outs: Range<usize>, depth: Range<usize>, _: usize, tiles: &mut Tiles) {
        // SAFETY: `Kernels` are only used where the CPU has their instructions.
        unsafe { V::tiles_of_rows(self.0.values, self.0.cols, outs, depth, tiles) }
    }

    fn fetch(&self, _: Range<usize>, _: Range<usize>, _: usize, _: usize) {}

    unsafe fn multiply<V: Kernels>(tiles: &Tiles, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: the caller's.
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

    fn prepare<V: Kernels>(&self, outs: Range<usize>, depth: Range<usize>, _: usize, tiles: &mut Tiles) {
        // SAFETY: `Kernels` are only used where the CPU has their instructions.
        unsafe { V::tiles_of_columns(self.0.values, self.0.cols, outs, depth, tiles) }
    }

    fn fetch(&self, _: Range<usize>, _: Range<usize>, _: usize, _: usize) {}

    unsafe fn multiply<V: Kernels>(tiles: &Tiles, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: the caller's.
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
    // SAFETY: the caller's; lines of `out` are checked by slicing.
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
