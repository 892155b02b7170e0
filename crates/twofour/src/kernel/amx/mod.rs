//! Many tokens on a machine with AMX: bf16 and int8 products in tiles of 16 by 16.
//!
//! The tiles know no sparsity: a 2:4 weight is expanded to dense tiles on the fly, a block of outputs and of depth at a time, which
//! then meets all tokens from the second cache. So 2:4 gains nothing here but the memory; it loses the expansion, the less
//! the more tokens there are.
//!
//! Subnormal bf16 values count as zero, as the instructions have it.

mod dense;
mod expand;
mod tile;
mod transpose;

use std::{
    any::TypeId,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bytemuck::Zeroable;
use half::bf16;

use super::{
    arguments::Sums,
    dense_block::DenseBlock,
    element::KernelElement,
    engine::{Cpu, HasAmx, HasAvx512},
    scratch::Scratch,
    share::{LEAST_PART, share_elements, share_expecting, threads},
    strips::{ROWS, StripsRef},
};
pub(super) use tile::TileElement;

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

/// The proof to multiply so many tokens by tiles with, where that pays.
pub(super) fn choose(cpu: Cpu, tokens: usize) -> Option<HasAmx> {
    match cpu {
        Cpu::Amx(has) if tokens >= MANY => Some(has),
        _ => None,
    }
}

/// `x · Wᵀ` for a 2:4 weight of floats where tiles should multiply it: a bf16 weight, many tokens, and no activation that would leave a trace
/// in a product with zero.
pub(super) fn sparse_floats<T: KernelElement>(
    cpu: Cpu,
    weight: StripsRef<'_, T>,
    x: &[T],
    tokens: usize,
) -> Option<Sums<f32>> {
    let has = choose(cpu, tokens)?;
    let x = without_special(bytemuck::cast_slice(x))?;
    Some(sparse(has, weight.as_type::<bf16>()?, x, tokens))
}

/// [`sparse_floats`] for a dense weight.
pub(super) fn dense_floats<T: KernelElement>(
    cpu: Cpu,
    weight: DenseBlock<'_, T>,
    x: &[T],
    tokens: usize,
) -> Option<Sums<f32>> {
    let has = choose(cpu, tokens).filter(|_| TypeId::of::<T>() == TypeId::of::<bf16>())?;
    let values: &[bf16] = bytemuck::cast_slice(weight.values);
    let weight = DenseBlock { rows: weight.rows, cols: weight.cols, values };
    let x = without_special(bytemuck::cast_slice(x))?;
    Some(dense(has, weight, x, tokens))
}

/// The activations, unless one may give other than zero when multiplied with zero: tiles multiply what was pruned.
fn without_special<E: TileElement>(x: &[E]) -> Option<&[E]> {
    let special = AtomicBool::new(false);
    let look = |x: &[E]| {
        if x.iter().fold(false, |special, v| special | v.is_special()) {
            special.store(true, Ordering::Relaxed);
        }
    };
    share_elements(x.len(), x.chunks(LEAST_PART), look);
    (!special.into_inner()).then_some(x)
}

/// A weight that fills tiles.
trait Factor: Copy + Sync {
    type Element: TileElement;

    fn rows(&self) -> usize;
    fn cols(&self) -> usize;

    /// Packs the activations of 16 tokens, `[tokens, cols]`, tile by tile along the depth.
    fn pack_tokens(has: HasAvx512, x: &[Self::Element], cols: usize, tiles: &mut [u8]);

    /// Fills tiles, from tile `first` of the depth on, with 16 rows.
    fn fill(&self, has: HasAvx512, strip: usize, first: usize, tiles: &mut [u8]);

    /// Adds to the sums of two strips with two tiles of tokens: `sums[strip][token tile]`.
    ///
    /// # Safety
    /// The CPU has AMX and the tiles are configured; the pointers are valid for `depth` tiles and for two tiles of sums.
    unsafe fn multiply(
        weights: [*const u8; 2],
        tokens: [*const u8; 2],
        depth: usize,
        sums: [*mut <Self::Element as TileElement>::Sum; 2],
    );

    /// Puts a finished tile of sums in the order `[token, row]`.
    fn finish(has: HasAvx512, sums: &mut [<Self::Element as TileElement>::Sum]);
}

/// `x · Wᵀ` for a 2:4 weight, x `[tokens, cols]`.
pub(super) fn sparse<E: TileElement>(has: HasAmx, weight: StripsRef<'_, E>, x: &[E], tokens: usize) -> Sums<E::Sum> {
    product(has, weight, x, tokens)
}

/// `x · Wᵀ` for a dense weight, x `[tokens, cols]`.
pub(super) fn dense<E: TileElement>(has: HasAmx, weight: DenseBlock<'_, E>, x: &[E], tokens: usize) -> Sums<E::Sum> {
    product(has, weight, x, tokens)
}

/// `x · Wᵀ`.
fn product<F: Factor>(
    has: HasAmx,
    weight: F,
    x: &[F::Element],
    tokens: usize,
) -> Sums<<F::Element as TileElement>::Sum> {
    let cols = weight.cols();
    let depth = (cols * size_of::<F::Element>()).div_ceil(LINE);
    // Two tiles of tokens and two strips are multiplied at once.
    let stride = tokens.next_multiple_of(2 * ROWS);
    let strips = weight.rows().div_ceil(ROWS).next_multiple_of(2);
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
            F::pack_tokens(has.avx512(), &x[tokens.start * cols..tokens.end * cols], cols, tiles);
        };
        share_elements((end - start) * cols / LINE, packed.chunks_mut(depth * TILE).enumerate(), pack);
        share_expecting(
            expected(strips * ROWS, cols, end - start),
            sums.values.chunks_mut(block * stride * ROWS).enumerate(),
            || Scratch::take(block * DEPTH * TILE),
            |weights, (i, sums)| {
                let sums: Vec<_> = sums.chunks_exact_mut(stride * ROWS).map(|s| &mut s[start * ROWS..]).collect();
                multiply_block(has, weight, i * block, weights, &packed, depth, sums);
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

/// Multiplies some strips, from `first` on, with packed tokens of `depth` tiles each; each of `sums` starts at the first of them.
fn multiply_block<F: Factor>(
    has: HasAmx,
    weight: F,
    first: usize,
    weights: &mut [u8],
    packed: &[u8],
    depth: usize,
    mut sums: Vec<&mut [<F::Element as TileElement>::Sum]>,
) {
    let token_tiles = packed.len() / (depth * TILE);
    for sums in &mut sums {
        sums[..token_tiles * SUMS].fill(Zeroable::zeroed());
    }
    tile::configure(has);
    for start in (0..depth).step_by(DEPTH) {
        let steps = DEPTH.min(depth - start);
        for (strip, tiles) in (first..).zip(weights.chunks_exact_mut(DEPTH * TILE)).take(sums.len()) {
            weight.fill(has.avx512(), strip, start, &mut tiles[..steps * TILE]);
        }
        for (pair, weights) in sums.chunks_exact_mut(2).zip(weights.chunks_exact(2 * DEPTH * TILE)) {
            for token_tile in (0..token_tiles).step_by(2) {
                let tokens =
                    [token_tile, token_tile + 1].map(|t| packed[(t * depth + start) * TILE..][..steps * TILE].as_ptr());
                let weights = [0, DEPTH * TILE].map(|at| weights[at..][..steps * TILE].as_ptr());
                let [a, b] = pair else { continue };
                let sums = [a, b].map(|sums| sums[token_tile * SUMS..][..2 * SUMS].as_mut_ptr());
                // SAFETY: `has` is proof of AMX, `configure` has run on this thread, and the slices above are `steps` tiles and two tiles of sums long.
                unsafe { F::multiply(weights, tokens, steps, sums) };
            }
        }
    }
    tile::release(has);
    for sums in &mut sums {
        sums[..token_tiles * SUMS].chunks_exact_mut(SUMS).for_each(|tile| F::finish(has.avx512(), tile));
    }
}
