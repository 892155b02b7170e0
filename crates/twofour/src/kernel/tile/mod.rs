//! Many tokens on a CPU with tiles: bf16 and int8 products in tiles of 16 by 16.
//!
//! Tiles know no sparsity: a 2:4 weight is expanded to dense tiles, a block of outputs and of depth at a time, which
//! then meets all tokens from the second cache. So 2:4 saves memory only, and pays an expansion that is amortised over
//! tokens.
//!
//! Sixteen rows of 64 bytes are a left factor. Of a right factor, a row holds four bytes of depth of sixteen columns:
//! this is how strips lie, so that a line of a strip becomes two rows of a tile, lane by lane. So a 2:4 weight is the
//! right factor and the tokens the left one. A dense weight is the left factor, sixteen rows, 64 bytes of each, copied
//! as they are, and the tokens are transposed once instead.
//!
//! Subnormal bf16 values count as zero, as the instructions have it.
//!
//! A further instruction set with tiles is a file here with an `impl Tile`, and is named in [the table](super::vector).

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod permission;

use std::{
    fmt::Debug,
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bytemuck::Zeroable;
use half::bf16;

use super::{
    arguments::Sums,
    engine::Cpu,
    format::{Format, Weight},
    scratch::Scratch,
    share::{MIN_PART, share_elements, share_expecting, threads},
    strips::{ROWS, Strip},
};
#[cfg(target_arch = "x86_64")]
pub(super) use amx::Amx;

/// Tokens from which tiles are worth their filling.
const MANY: usize = 16;

/// Tokens multiplied in one go: their activations stay in the second cache for a block of depth.
const TOKENS: usize = 512;

/// Tiles of depth in a block: two strips of weights, or two tiles of tokens, of this depth fill the first cache.
const DEPTH: usize = 16;

/// Strips of a block at most.
const STRIPS: usize = 16;

/// Bytes of a tile: 16 rows of 64.
const TILE: usize = 1024;

/// Bytes of a tile's row.
const LINE: usize = 64;

/// Elements of a tile of sums.
const SUMS: usize = ROWS * ROWS;

/// Lines of a strip that a tile is expanded from.
const LINES: usize = TILE / (2 * LINE);

/// An instruction set with tiles of 16 rows of 64 bytes, for elements `E`: bf16 or i8.
///
/// # Safety
/// Methods may be called only where the machine has the tiles, and with pointers that are valid for what is read and
/// written. Implementors must read and write no more than that.
pub(in crate::kernel) unsafe trait Tile<E: Element>: Debug + Sync {
    /// Makes this thread's tiles ready.
    unsafe fn configure(&self);

    /// Frees this thread's tiles, so that the operating system need not save them.
    unsafe fn release(&self);

    /// Adds to four tiles of sums the products of two left and two right tiles, for each of `depth` steps, whose tiles
    /// lie one after the other: `sums[left][right]`. The tiles are configured.
    unsafe fn multiply(&self, left: [*const u8; 2], right: [*const u8; 2], depth: usize, sums: [[*mut E::Sum; 2]; 2]);

    /// Expands each of some lines of a strip to two rows of a tile.
    unsafe fn expand(&self, strip: Strip<'_, E>, lines: Range<usize>, rows: &mut [u8]);

    /// Transposes 16 by 16 words.
    unsafe fn transpose(&self, words: &mut [u32; ROWS * ROWS]);
}

/// An element that tiles multiply.
pub trait Element: Format<Value = Self, Stored = Self, Grouping = ()> + crate::Element {}

impl Element for bf16 {}
impl Element for i8 {}

/// The tiles of an engine.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernel) struct Tiles {
    pub(super) bf16: &'static dyn Tile<bf16>,
    pub(super) i8: &'static dyn Tile<i8>,
}

/// `x · Wᵀ` for bf16 where tiles should multiply it: many tokens, and no activation that would leave a trace in a
/// product with zero, since tiles multiply what was pruned.
pub(super) fn floats(cpu: Cpu, weight: Weight<'_, bf16>, x: &[bf16], tokens: usize) -> Option<Sums<f32>> {
    let tiles = cpu.tiles().filter(|_| tokens >= MANY)?;
    let special = AtomicBool::new(false);
    let look = |x: &[bf16]| {
        if x.iter().fold(false, |special, v| special | !v.is_finite()) {
            special.store(true, Ordering::Relaxed);
        }
    };
    share_elements(x.len(), x.chunks(MIN_PART), look);
    // SAFETY: a `Cpu` has the tiles that it returns.
    (!special.into_inner()).then(|| unsafe { product(tiles.bf16, weight, x, tokens) })
}

/// `x · Wᵀ` for int8 where tiles should multiply it: many tokens.
pub(super) fn bytes(cpu: Cpu, weight: Weight<'_, i8>, x: &[i8], tokens: usize) -> Option<Sums<i32>> {
    let tiles = cpu.tiles().filter(|_| tokens >= MANY)?;
    // SAFETY: a `Cpu` has the tiles that it returns.
    Some(unsafe { product(tiles.i8, weight, x, tokens) })
}

impl<E: Element> Weight<'_, E> {
    fn shape(&self) -> (usize, usize) {
        match self {
            Weight::Sparse(strips) => (strips.shape.rows, strips.shape.cols),
            Weight::Dense(rows) => (rows.rows, rows.cols),
        }
    }

    /// Packs the activations of 16 tokens, `[tokens, cols]`, tile by tile along the depth: the left factor of a 2:4
    /// weight, the right one of a dense weight.
    ///
    /// # Safety
    /// The tiles are available.
    unsafe fn pack_tokens(&self, tile: &dyn Tile<E>, x: &[E], tiles: &mut [u8]) {
        let (_, cols) = self.shape();
        pack_rows(x, cols, 0, tiles);
        if let Weight::Dense(_) = self {
            for words in bytemuck::cast_slice_mut(tiles).as_chunks_mut().0 {
                // SAFETY: the tiles are available, as this function requires.
                unsafe { tile.transpose(words) };
            }
        }
    }

    /// Fills tiles, from tile `first` of the depth on, with 16 rows.
    ///
    /// # Safety
    /// The tiles are available.
    unsafe fn fill(&self, tile: &dyn Tile<E>, strip: usize, first: usize, tiles: &mut [u8]) {
        match self {
            // A strip that completes a pair.
            Weight::Sparse(strips) if strip >= strips.shape.strips() => tiles.fill(0),
            Weight::Sparse(strips) => {
                let strip = strips.strip_of(strip);
                let lines = first * LINES..(first * LINES + tiles.len() / (2 * LINE)).min(strip.lines());
                let (filled, rest) = tiles.split_at_mut(lines.len() * 2 * LINE);
                // SAFETY: the tiles are available, as this function requires; `filled` are two rows for each line.
                unsafe { tile.expand(strip, lines, filled) };
                rest.fill(0);
            }
            Weight::Dense(weight) => {
                let rows = (strip * ROWS).min(weight.rows)..((strip + 1) * ROWS).min(weight.rows);
                let values = &weight.values[rows.start * weight.cols..rows.end * weight.cols];
                pack_rows(values, weight.cols, first, tiles);
            }
        }
    }

    /// Adds to the sums of two strips with two tiles of tokens: each of `sums` is of a strip, and has two tiles.
    ///
    /// # Safety
    /// The tiles are available and configured; the pointers are valid for `depth` tiles and for two tiles of sums.
    unsafe fn multiply(
        &self,
        tile: &dyn Tile<E>,
        weights: [*const u8; 2],
        tokens: [*const u8; 2],
        depth: usize,
        sums: [*mut E::Sum; 2],
    ) {
        // SAFETY: the tiles are there and the pointers are valid, as this function requires; `sums` are valid for two
        // tiles, the second of which is `SUMS` further.
        unsafe {
            match self {
                Weight::Sparse(_) => {
                    let of_token = |token: usize| sums.map(|sums| sums.add(token * SUMS));
                    tile.multiply(tokens, weights, depth, [of_token(0), of_token(1)]);
                }
                Weight::Dense(_) => tile.multiply(weights, tokens, depth, sums.map(|sums| [sums, sums.add(SUMS)])),
            }
        }
    }
}

/// Packs up to 16 rows of `cols` elements into tiles, from tile `first` of the depth on; what is missing is zero.
fn pack_rows<E: Element>(rows: &[E], cols: usize, first: usize, tiles: &mut [u8]) {
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

/// `x · Wᵀ`.
///
/// # Safety
/// The tiles are available.
unsafe fn product<E: Element>(tile: &dyn Tile<E>, weight: Weight<'_, E>, x: &[E], tokens: usize) -> Sums<E::Sum> {
    let (rows, cols) = weight.shape();
    let depth = (cols * size_of::<E>()).div_ceil(LINE);
    // Two tiles of tokens and two strips are multiplied at once.
    let stride = tokens.next_multiple_of(2 * ROWS);
    let strips = rows.div_ceil(ROWS).next_multiple_of(2);
    let mut sums = Sums { values: Scratch::take(strips * stride * ROWS), stride };
    if sums.values.is_empty() || depth == 0 {
        sums.values.fill(Zeroable::zeroed());
        return sums;
    }
    let block = strips.div_ceil(4 * threads()).next_multiple_of(2).min(STRIPS);
    for start in (0..tokens).step_by(TOKENS) {
        let end = (start + TOKENS).min(tokens);
        let mut packed = Scratch::take((end - start).div_ceil(2 * ROWS) * 2 * depth * TILE);
        let pack = |(i, tiles): (usize, &mut [u8])| {
            let tokens = (start + i * ROWS).min(end)..(start + (i + 1) * ROWS).min(end);
            // SAFETY: the tiles are available, as this function requires.
            unsafe { weight.pack_tokens(tile, &x[tokens.start * cols..tokens.end * cols], tiles) };
        };
        share_elements((end - start) * cols / LINE, packed.chunks_mut(depth * TILE).enumerate(), pack);
        share_expecting(
            expected(strips * ROWS, cols, end - start),
            sums.values.chunks_mut(block * stride * ROWS).enumerate(),
            || Scratch::take(block * DEPTH * TILE),
            |weights, (i, sums)| {
                let sums: Vec<_> = sums.chunks_exact_mut(stride * ROWS).map(|s| &mut s[start * ROWS..]).collect();
                // SAFETY: the tiles are available, as this function requires.
                unsafe { multiply_block(tile, weight, i * block, weights, &packed, depth, sums) };
            },
        );
    }
    sums
}

/// How long one thread takes for a product, roughly; rather too long, so that threads are woken for it.
fn expected(rows: usize, cols: usize, tokens: usize) -> Duration {
    /// Products of a thread in a nanosecond.
    const PRODUCTS: usize = 500;
    Duration::from_nanos((rows.saturating_mul(cols).saturating_mul(tokens) / PRODUCTS) as u64)
}

/// Multiplies some strips, from `first` on, with packed tokens of `depth` tiles each; each of `sums` starts at the
/// first of them.
///
/// # Safety
/// The tiles are available.
unsafe fn multiply_block<E: Element>(
    tile: &dyn Tile<E>,
    weight: Weight<'_, E>,
    first: usize,
    weights: &mut [u8],
    packed: &[u8],
    depth: usize,
    mut sums: Vec<&mut [E::Sum]>,
) {
    let token_tiles = packed.len() / (depth * TILE);
    for sums in &mut sums {
        sums[..token_tiles * SUMS].fill(Zeroable::zeroed());
    }
    // SAFETY: the tiles are available, as this function requires.
    unsafe { tile.configure() };
    for start in (0..depth).step_by(DEPTH) {
        let steps = DEPTH.min(depth - start);
        for (strip, tiles) in (first..).zip(weights.chunks_exact_mut(DEPTH * TILE)).take(sums.len()) {
            // SAFETY: the tiles are available, as this function requires.
            unsafe { weight.fill(tile, strip, start, &mut tiles[..steps * TILE]) };
        }
        for (pair, weights) in sums.chunks_exact_mut(2).zip(weights.chunks_exact(2 * DEPTH * TILE)) {
            for token_tile in (0..token_tiles).step_by(2) {
                let tokens =
                    [token_tile, token_tile + 1].map(|t| packed[(t * depth + start) * TILE..][..steps * TILE].as_ptr());
                let weights = [0, DEPTH * TILE].map(|at| weights[at..][..steps * TILE].as_ptr());
                let [a, b] = pair else { continue };
                let sums = [a, b].map(|sums| sums[token_tile * SUMS..][..2 * SUMS].as_mut_ptr());
                // SAFETY: the tiles are available, as this function requires, and configured; the slices above are
                // `steps` tiles and two tiles of sums long.
                unsafe { weight.multiply(tile, weights, tokens, steps, sums) };
            }
        }
    }
    // SAFETY: the tiles are available, as this function requires.
    unsafe { tile.release() };
    if let Weight::Dense(_) = weight {
        // From `[row, token]` to `[token, row]`.
        for sums in &mut sums {
            for words in bytemuck::cast_slice_mut(&mut sums[..token_tiles * SUMS]).as_chunks_mut().0 {
                // SAFETY: the tiles are available, as this function requires.
                unsafe { tile.transpose(words) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        Compressed, MatrixRef,
        kernel::{dense::Rows, strips::Strips},
    };

    /// Tiles in plain Rust: what every instruction set must compute.
    #[derive(Debug)]
    pub(super) struct Plain;

    /// Four bytes of a factor as elements: products of a step are summed four bytes at a time.
    trait Number: Element {
        fn product(self, other: Self) -> Self::Sum;
        fn add(a: Self::Sum, b: Self::Sum) -> Self::Sum;
    }

    impl Number for bf16 {
        fn product(self, other: Self) -> f32 {
            self.to_f32() * other.to_f32()
        }
        fn add(a: f32, b: f32) -> f32 {
            a + b
        }
    }

    impl Number for i8 {
        fn product(self, other: Self) -> i32 {
            i32::from(self) * i32::from(other)
        }
        fn add(a: i32, b: i32) -> i32 {
            a + b
        }
    }

    // SAFETY: reads and writes go as far as the trait says.
    unsafe impl<E: Number> Tile<E> for Plain {
        unsafe fn configure(&self) {}

        unsafe fn release(&self) {}

        unsafe fn multiply(
            &self,
            left: [*const u8; 2],
            right: [*const u8; 2],
            depth: usize,
            sums: [[*mut E::Sum; 2]; 2],
        ) {
            let factor = |p: *const u8| -> &[E] {
                // SAFETY: the pointers are valid for `depth` tiles, as the trait requires.
                bytemuck::cast_slice(unsafe { std::slice::from_raw_parts(p, depth * TILE) })
            };
            let per_four_bytes = 4 / size_of::<E>();
            for (left, sums) in left.into_iter().zip(sums) {
                for (right, sums) in right.into_iter().zip(sums) {
                    let (left, right) = (factor(left), factor(right));
                    // SAFETY: the pointers are valid for a tile of sums, as the trait requires.
                    let sums = unsafe { std::slice::from_raw_parts_mut(sums, SUMS) };
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let (row, col) = (i / ROWS, i % ROWS);
                        for four in 0..depth * ROWS {
                            let (step, four) = (four / ROWS * TILE / size_of::<E>(), four % ROWS);
                            for k in 0..per_four_bytes {
                                let a = left[step + (row * ROWS + four) * per_four_bytes + k];
                                let b = right[step + (four * ROWS + col) * per_four_bytes + k];
                                *sum = E::add(*sum, a.product(b));
                            }
                        }
                    }
                }
            }
        }

        unsafe fn expand(&self, strip: Strip<'_, E>, lines: Range<usize>, rows: &mut [u8]) {
            let elements: &mut [E] = bytemuck::cast_slice_mut(rows);
            elements.fill(E::ZERO);
            let per_four_bytes = 4 / size_of::<E>();
            let groups = lines.start * E::GROUPS..lines.end * E::GROUPS;
            for (i, group) in groups.enumerate() {
                for row in 0..ROWS {
                    for (position, value) in strip.kept(row, group) {
                        let k = 4 * i + position;
                        // Of two zeros at one place, none matters.
                        let slot =
                            &mut elements[(k / per_four_bytes * ROWS + row) * per_four_bytes + k % per_four_bytes];
                        *slot = if value.is_zero() { *slot } else { value };
                    }
                }
            }
        }

        unsafe fn transpose(&self, words: &mut [u32; ROWS * ROWS]) {
            for i in 0..ROWS {
                for j in 0..i {
                    words.swap(i * ROWS + j, j * ROWS + i);
                }
            }
        }
    }

    /// Whole numbers, whose sums are exact in any order.
    fn check<E: Number>((rows, cols, tokens): (usize, usize, usize), of: impl Fn(usize) -> E, zero: E::Sum)
    where
        E::Sum: PartialEq + std::fmt::Debug,
    {
        let dense: Vec<E> = (0..rows * cols).map(|i| of(i * 37)).collect();
        let x: Vec<E> = (0..tokens * cols).map(|i| of(i * 53 + 7)).collect();
        let compressed = Compressed::from_pruned(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
        let (strips, pruned) = (Strips::<E>::pack(&compressed, ()).unwrap(), compressed.to_dense());
        let cases =
            [(Weight::Sparse(strips.view()), &pruned), (Weight::Dense(Rows { rows, cols, values: &dense }), &dense)];
        for (weight, values) in cases {
            // SAFETY: plain Rust is always available.
            let sums = unsafe { product(&Plain, weight, &x, tokens) };
            for token in 0..tokens {
                for row in 0..rows {
                    let products = (0..cols).map(|k| values[row * cols + k].product(x[token * cols + k]));
                    let expected = products.fold(zero, E::add);
                    let found = sums.values[((row / ROWS) * sums.stride + token) * ROWS + row % ROWS];
                    assert_eq!(found, expected, "{rows} x {cols}, y[{token}, {row}]");
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]
        #[test]
        fn products_in_tiles_are_exact((rows, cols, tokens) in (0usize..40, 0usize..80, 0usize..40)) {
            check::<i8>((rows, cols, tokens), |i| (i % 251) as u8 as i8, 0);
            check::<bf16>((rows, cols, tokens), |i| bf16::from_f32((i % 15) as f32 - 7.0), 0.0);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "too large for Miri")]
    fn more_tokens_and_more_depth_than_a_block_has_are_exact() {
        check::<i8>((35, 1100, 19), |i| (i % 251) as u8 as i8, 0);
        check::<bf16>((3, 70, TOKENS + 5), |i| bf16::from_f32((i % 15) as f32 - 7.0), 0.0);
    }
}
