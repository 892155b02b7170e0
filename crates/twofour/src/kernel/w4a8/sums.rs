//! The kernel of strips: int4 weights by int8 activations, exact sums of a group in i32, groups added in f32.

use std::marker::PhantomData;

use super::{
    super::{
        aligned::CACHE_LINE,
        decode::strips::StripKernel,
        strips::{Order, ROWS},
        vector::{ByteVector, prefetch},
    },
    layout::{BLOCK_BYTES, BLOCK_COLS, Strip},
};

/// Lines of a block.
const LINES: usize = <i8 as Order>::BLOCK_LINES;

/// Columns of a line.
const LINE_COLS: usize = BLOCK_COLS / LINES;

/// The kernel for the vectors `V`.
pub(super) struct Int4Kernel<V>(PhantomData<V>);

// SAFETY: `sums` reads the strips and, of each token, the activations of their blocks, to which the padded columns are completed.
unsafe impl<V: ByteVector> StripKernel for Int4Kernel<V> {
    type Strip<'a> = Strip<'a>;
    type Activation = i8;
    type Sum = f32;

    // The sums of groups in f32 are in the output, not in registers. More tokens than int8 has in a pass, since unpacking a line takes longer.
    const TOKENS: usize = if V::BYTES == 4 * ROWS { 8 } else { 3 };
    const SUMS: usize = if V::BYTES == 4 * ROWS { 16 } else { 6 };

    // Loops over indices: LLVM leaves calls of the iterators and maps of arrays, which cost more than a line.
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn sums<const S: usize, const N: usize>(
        strips: [Strip<'_>; S],
        x: *const i8,
        stride: usize,
        out: [[*mut f32; N]; S],
    ) {
        // SAFETY: all reads are inside the strips and the activations, and `out` is valid for `ROWS` sums each; prefetching may point anywhere.
        unsafe {
            let (mut x, mut at) = ([x; N], [strips[0].as_ptr(); S]);
            for n in 0..N {
                x[n] = x[n].add(n * stride);
            }
            for s in 0..S {
                at[s] = strips[s].as_ptr();
                for n in 0..N {
                    out[s][n].cast::<[f32; ROWS]>().write([0.0; ROWS]);
                }
            }
            for blocks in strips[0].groups() {
                let headers = at;
                let (mut low, mut high) = ([[V::zero(); N]; S], [[V::zero(); N]; S]);
                for s in 0..S {
                    prefetch(at[s].wrapping_add(V::AHEAD));
                    at[s] = at[s].add(CACHE_LINE);
                }
                for _ in 0..blocks {
                    for s in 0..S {
                        prefetch(at[s].wrapping_add(V::AHEAD));
                    }
                    line::<V, S, N, 0>(at, x, &mut low, &mut high);
                    line::<V, S, N, 1>(at, x, &mut low, &mut high);
                    line::<V, S, N, 2>(at, x, &mut low, &mut high);
                    line::<V, S, N, 3>(at, x, &mut low, &mut high);
                    for s in 0..S {
                        at[s] = at[s].add(BLOCK_BYTES);
                    }
                    for n in 0..N {
                        x[n] = x[n].add(BLOCK_COLS);
                    }
                }
                for s in 0..S {
                    let scales = V::scales::<0>(headers[s]);
                    for n in 0..N {
                        low[s][n].add_scaled(scales, out[s][n]);
                    }
                    if V::BYTES < 4 * ROWS {
                        let scales = V::scales::<1>(headers[s]);
                        for n in 0..N {
                            high[s][n].add_scaled(scales, out[s][n].add(V::BYTES / 4));
                        }
                    }
                }
            }
        }
    }
}

/// Adds the products of line `LINE` of the blocks at `at` with the tokens at `x`.
///
/// # Safety
/// The CPU has `V`'s instructions; a block is at each of `at`, and [`BLOCK_COLS`] activations at each of `x`.
#[inline(always)]
unsafe fn line<V: ByteVector, const S: usize, const N: usize, const LINE: usize>(
    at: [*const u8; S],
    x: [*const i8; N],
    low: &mut [[V; N]; S],
    high: &mut [[V; N]; S],
) {
    // SAFETY: the line's words, integers and activations are inside the block and what is at `x`, as this function requires; prefetching may point anywhere.
    unsafe {
        let mut eight = [V::zero(); N];
        for n in 0..N {
            eight[n] = V::splat_eight(x[n].add(LINE * LINE_COLS));
        }
        for s in 0..S {
            let codes = at[s].cast::<u32>().add(LINE * <i8 as Order>::CODE_WORDS);
            let values = at[s].add(CACHE_LINE * (1 + LINE / 2)).cast::<i8>();
            if LINE.is_multiple_of(2) {
                prefetch(values.cast::<u8>().wrapping_add(V::AHEAD));
            }
            let (places, first) = (V::places::<0>(codes), integers::<V, LINE>(values));
            for n in 0..N {
                low[s][n] = eight[n].pick(places).dot(first, low[s][n]);
            }
            if V::BYTES < 4 * ROWS {
                let (places, second) = (V::places::<1>(codes), integers::<V, LINE>(values.add(V::BYTES)));
                for n in 0..N {
                    high[s][n] = eight[n].pick(places).dot(second, high[s][n]);
                }
            }
        }
    }
}

/// The integers of line `LINE` in a register of bytes, times 16.
///
/// # Safety
/// The CPU has `V`'s instructions; a register is at `at`.
#[inline(always)]
unsafe fn integers<V: ByteVector, const LINE: usize>(at: *const i8) -> V {
    // SAFETY: the CPU has `V`'s instructions and the pointer is valid, as this function requires.
    unsafe { if LINE.is_multiple_of(2) { V::load(at).low_nibbles() } else { V::load(at).high_nibbles() } }
}
