//! The loops of f32, f16 and bf16, whose weights are widened to f32 registers.

use super::{Block, KernelElement, blocks};
use crate::kernel::{
    aligned::CACHE_LINE,
    dense::Rows,
    strips::Strip,
    vector::{Vector, parts},
};

/// How far ahead of its reading a strip, or a row, is fetched, in bytes.
const AHEAD: usize = 1024;

/// See [`Format::sums`](super::Format::sums). The four activations of a group stand in one register; a shuffle picks
/// for each row of the strip the one that its first, then its second value multiplies. Each lane is one row's sum.
///
/// # Safety
/// As there.
#[allow(clippy::needless_range_loop, reason = "the index is of registers and of memory")]
#[inline(always)]
pub(super) unsafe fn sums<V: Vector, T: KernelElement, const S: usize, const N: usize>(
    strips: [Strip<'_, T>; S],
    x: *const f32,
    stride: usize,
    out: [[*mut f32; N]; S],
) {
    // SAFETY: `block_start + CACHE_LINE + i * LINE_BYTES` is the start of the strip's line `first + i`, which exists; a
    // token has four activations for each line; `out` has ROWS sums, which the parts cover. Prefetching may point
    // anywhere.
    unsafe {
        let x: [_; N] = std::array::from_fn(|n| x.add(n * stride));
        let mut sums = [[V::zero_rows(); N]; S];
        let start = strips.map(|strip| strip.as_ptr());
        for Block { start: block, first, count } in blocks::<T>(strips[0].lines()) {
            for strip in start {
                V::prefetch(strip.wrapping_add(block + AHEAD));
            }
            for i in 0..count {
                let mut four = [V::four(x[0].add(4 * (first + i))); N];
                for n in 1..N {
                    four[n] = V::four(x[n].add(4 * (first + i)));
                }
                for s in 0..S {
                    let codes = start[s].add(block).cast::<u32>().add(i * T::CODE_WORDS);
                    let values = start[s].add(block + CACHE_LINE + i * T::LINE_BYTES).cast::<T>();
                    for line in 0..T::LINE_BYTES / CACHE_LINE {
                        V::prefetch(values.cast::<u8>().wrapping_add(AHEAD + line * CACHE_LINE));
                    }
                    for part in 0..parts::<V>() {
                        let [w_first, w_second] = T::load_line::<V>(values, part);
                        let (first, second) = (V::positions(*codes, part), V::positions(*codes.add(1), part));
                        for n in 0..N {
                            let sum = V::multiply_add(V::pick(four[n], first), w_first, sums[s][n][part]);
                            sums[s][n][part] = V::multiply_add(V::pick(four[n], second), w_second, sum);
                        }
                    }
                }
            }
        }
        for s in 0..S {
            for n in 0..N {
                for part in 0..parts::<V>() {
                    V::store(sums[s][n][part], out[s][n].add(part * V::LANES));
                }
            }
        }
    }
}

/// See [`DenseFormat::dots`](super::DenseFormat::dots).
///
/// # Safety
/// As there; each of `x` is valid for the weight's columns.
#[inline(always)]
pub(super) unsafe fn dots<V: Vector, T: KernelElement, const R: usize, const N: usize>(
    weight: Rows<'_, T>,
    rows: [usize; R],
    x: [*const f32; N],
) -> [[f32; N]; R] {
    // SAFETY: a register is loaded from each `col` with `col + LANES <= cols`, and single elements below `cols`;
    // prefetching may point anywhere.
    unsafe {
        let values = rows.map(|row| weight.values.as_ptr().add(row * weight.cols));
        let mut sums = [[V::zero(); N]; R];
        let whole = weight.cols - weight.cols % V::LANES;
        let per_line = CACHE_LINE / size_of::<T>();
        let mut col = 0;
        while col < whole {
            let mut activations = [V::zero(); N];
            for n in 0..N {
                activations[n] = V::load(x[n].add(col));
            }
            for r in 0..R {
                if col % per_line == 0 {
                    V::prefetch(values[r].add(col).cast::<u8>().wrapping_add(AHEAD));
                }
                let w = T::load::<V>(values[r].add(col));
                for n in 0..N {
                    sums[r][n] = V::multiply_add(w, activations[n], sums[r][n]);
                }
            }
            col += V::LANES;
        }
        let mut out = [[0.0; N]; R];
        for r in 0..R {
            for n in 0..N {
                out[r][n] = V::sum(sums[r][n]);
            }
        }
        for (r, sums) in out.iter_mut().enumerate() {
            for (n, sum) in sums.iter_mut().enumerate() {
                for col in whole..weight.cols {
                    *sum += (*values[r].add(col)).to_f32() * *x[n].add(col);
                }
            }
        }
        out
    }
}

/// `impl Format` and `impl DenseFormat` for a float: where the first (`which` 0) and the second value of a row of a
/// line are.
macro_rules! float_format {
    ($type:ty, $value:expr) => {
        // SAFETY: `sums` reads the strips' lines and four activations for each.
        unsafe impl Format for $type {
            type Value = $type;
            type Stored = $type;
            type Activation = f32;
            type Sum = f32;
            type Grouping = ();
            type Beside<'a> = ();
            const GROUPS: usize = 1;
            const LINE_BYTES: usize = 2 * ROWS * size_of::<$type>();
            const TOKENS: usize = 4;

            fn borrow(_: &()) {}

            #[inline(always)]
            fn value(row: usize, _: usize, which: usize) -> usize {
                $value(row, which)
            }

            #[inline(always)]
            fn code(row: usize, _: usize, which: usize) -> (usize, u32) {
                (which, 2 * row as u32)
            }

            #[inline(always)]
            fn get(line: &[$type], value: usize) -> $type {
                line[value]
            }

            #[inline(always)]
            fn put(line: &mut [$type], value: usize, kept: $type) {
                line[value] = kept;
            }

            #[inline(always)]
            unsafe fn sums<V: Vector, const S: usize, const N: usize>(
                strips: [Strip<'_, Self>; S],
                x: *const f32,
                stride: usize,
                out: [[*mut f32; N]; S],
            ) {
                // SAFETY: the conditions are the same.
                unsafe { floats::sums::<V, Self, S, N>(strips, x, stride, out) }
            }
        }

        // SAFETY: `dots` reads the given rows and as many activations as the weight has columns.
        unsafe impl DenseFormat for $type {
            #[inline(always)]
            fn completed(cols: usize) -> usize {
                cols
            }

            #[inline(always)]
            fn dense_tokens<V: Vector>() -> usize {
                V::DENSE_TOKENS[0]
            }

            #[inline(always)]
            unsafe fn dots<V: Vector, const R: usize, const N: usize>(
                weight: Rows<'_, Self>,
                rows: [usize; R],
                x: [*const f32; N],
            ) -> [[f32; N]; R] {
                // SAFETY: the conditions are the same.
                unsafe { floats::dots::<V, Self, R, N>(weight, rows, x) }
            }
        }
    };
}
pub(super) use float_format;
