//! Few tokens by a dense weight, row by row: the contender, with the same care.
//!
//! A thread walks [`STREAMS`] parts of its rows side by side, each of them sequentially, so that the memory system sees a few long
//! streams and the activations that are loaded serve several rows.

use std::marker::PhantomData;

use super::super::{
    dense_block::DenseBlock,
    element::KernelElement,
    strips::ROWS,
    vector::{Vector, prefetch},
};

/// Parts of a block of rows that are read side by side.
pub(in crate::kernel) const STREAMS: usize = 4;

/// How far ahead of its reading a stream is fetched, in bytes.
pub(in crate::kernel) const AHEAD: usize = 1024;

/// Rows of each stream that meet all tokens before the next rows do: they stay in the second cache.
const STEPS: usize = ROWS / STREAMS;

/// A kernel that multiplies a few rows of a weight with a few tokens.
///
/// A trait and not a closure: LLVM must inline the kernel into a function that has the instructions enabled, or else every
/// intrinsic becomes a call, and only a function can be marked for that.
///
/// # Safety
/// Implementations read no rows but those given, and no more than `stride` activations of a token.
pub(in crate::kernel) unsafe trait RowKernel: Copy {
    /// What activations are made of.
    type Activation;
    /// What a dot product is.
    type Sum: Copy;

    /// Tokens whose sums, with all else, fit the registers: 2, 3 or 4.
    const TOKENS: usize;

    /// How many rows the weight has.
    fn rows(&self) -> usize;

    /// Dot products of a row of each stream with `N` tokens.
    ///
    /// # Safety
    /// The CPU has the kernel's instructions; `rows` are rows of the weight; each of `x` is a token's activations.
    unsafe fn dots<const N: usize>(
        self,
        rows: [usize; STREAMS],
        x: [*const Self::Activation; N],
    ) -> [[Self::Sum; N]; STREAMS];
}

/// Multiplies all rows with all tokens, `stride` apart: `[strip, token, ROWS]`.
///
/// # Safety
/// The CPU has the kernel's instructions; the activations are as many as the kernel reads.
#[inline(always)]
pub(in crate::kernel) unsafe fn walk<K: RowKernel>(kernel: K, x: &[K::Activation], stride: usize, out: &mut [K::Sum]) {
    let tokens = x.len() / stride;
    let length = kernel.rows().div_ceil(STREAMS);
    for start in (0..length).step_by(STEPS) {
        let steps = start..(start + STEPS).min(length);
        let mut first = 0;
        while first < tokens {
            // As few passes as can be, of as equal numbers of tokens as can be.
            let left = tokens - first;
            let n = left.div_ceil(left.div_ceil(K::TOKENS));
            // SAFETY: the CPU has the kernel's instructions, as this function requires; there are as many tokens as each pass takes.
            unsafe {
                match n {
                    1 => pass::<K, 1>(kernel, steps.clone(), first, x, stride, out),
                    2 => pass::<K, 2>(kernel, steps.clone(), first, x, stride, out),
                    3 => pass::<K, 3>(kernel, steps.clone(), first, x, stride, out),
                    _ => pass::<K, 4>(kernel, steps.clone(), first, x, stride, out),
                }
            }
            first += n;
        }
    }
}

/// Multiplies a few rows of each stream with `N` tokens from `first` on. A stream that has ended repeats its
/// last row.
///
/// # Safety
/// As [`walk`]; there are `N` tokens from `first` on.
#[inline(always)]
unsafe fn pass<K: RowKernel, const N: usize>(
    kernel: K,
    steps: std::ops::Range<usize>,
    first: usize,
    x: &[K::Activation],
    stride: usize,
    out: &mut [K::Sum],
) {
    let (tokens, rows) = (x.len() / stride, kernel.rows());
    let x: [*const K::Activation; N] = std::array::from_fn(|n| x[(first + n) * stride..].as_ptr());
    let length = rows.div_ceil(STREAMS);
    for step in steps {
        let rows: [usize; STREAMS] = std::array::from_fn(|s| (s * length + step).min(rows - 1));
        // SAFETY: the CPU has the kernel's instructions, as this function requires; `rows` are rows of the weight, and each of `x` is a token of `stride` activations.
        let sums = unsafe { kernel.dots(rows, x) };
        for (row, sums) in rows.into_iter().zip(sums) {
            for (n, sum) in sums.into_iter().enumerate() {
                out[(row / ROWS * tokens + first + n) * ROWS + row % ROWS] = sum;
            }
        }
    }
}

/// A float weight for the vectors `V`.
struct FloatKernel<'a, V, T>(DenseBlock<'a, T>, PhantomData<V>);

impl<V, T> Clone for FloatKernel<'_, V, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<V, T> Copy for FloatKernel<'_, V, T> {}

// SAFETY: `dots` reads the given rows and `cols` activations.
unsafe impl<V: Vector, T: KernelElement> RowKernel for FloatKernel<'_, V, T> {
    type Activation = f32;
    type Sum = f32;

    const TOKENS: usize = if V::LANES == 16 { 4 } else { 3 };

    fn rows(&self) -> usize {
        self.0.rows
    }

    #[inline(always)]
    unsafe fn dots<const N: usize>(self, rows: [usize; STREAMS], x: [*const f32; N]) -> [[f32; N]; STREAMS] {
        // SAFETY: the CPU has `V`'s instructions, `rows` are rows of the weight and `x` tokens' activations, as the trait requires.
        unsafe { dots::<V, T, STREAMS, N>(self.0, rows, x) }
    }
}

/// Multiplies a dense float block with every token of `x`: `[strip, token, ROWS]`.
///
/// # Safety
/// The CPU has `V`'s instructions.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector, T: KernelElement>(
    block: DenseBlock<'_, T>,
    x: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    assert!(stride >= block.cols);
    // SAFETY: the CPU has `V`'s instructions, as this function requires; a token has `cols` activations, by the assertion.
    unsafe { walk(FloatKernel::<V, T>(block, PhantomData), x, stride, out) }
}

/// Dot products of `R` rows with `N` tokens.
///
/// # Safety
/// The CPU has `V`'s instructions; `rows` are rows of the block; each of `x` is valid for `cols` elements.
#[inline(always)]
unsafe fn dots<V: Vector, T: KernelElement, const R: usize, const N: usize>(
    block: DenseBlock<'_, T>,
    rows: [usize; R],
    x: [*const f32; N],
) -> [[f32; N]; R] {
    // SAFETY: all offsets below stay inside the rows and the activations; prefetching may point anywhere.
    unsafe {
        let values = rows.map(|row| block.values.as_ptr().add(row * block.cols));
        let mut sums = [[V::zero(); N]; R];
        let whole = block.cols - block.cols % V::LANES;
        let per_line = 64 / size_of::<T>();
        let mut col = 0;
        while col < whole {
            let mut activations = [V::zero(); N];
            for n in 0..N {
                activations[n] = V::load(x[n].add(col));
            }
            for r in 0..R {
                if col % per_line == 0 {
                    prefetch(values[r].add(col).cast::<u8>().wrapping_add(AHEAD));
                }
                let w = V::widen(values[r].add(col));
                for n in 0..N {
                    sums[r][n] = w.multiply_add(activations[n], sums[r][n]);
                }
            }
            col += V::LANES;
        }
        let mut out = [[0.0; N]; R];
        for r in 0..R {
            for n in 0..N {
                out[r][n] = sums[r][n].sum();
            }
        }
        for (r, sums) in out.iter_mut().enumerate() {
            for (n, sum) in sums.iter_mut().enumerate() {
                for col in whole..block.cols {
                    *sum += (*values[r].add(col)).to_f32() * *x[n].add(col);
                }
            }
        }
        out
    }
}
