//! Few tokens: every weight is read once and the memory is what limits.
//!
//! The weight's rows are split among threads; within a thread, [`STREAMS`] parts of its rows are walked side by side,
//! each of them sequentially, so that the memory system sees a few long streams. Activations are picked by metadata (a shuffle inside 128-bit
//! blocks, whose index bits are those of the canonical metadata word) and multiplied with the kept values as they lie.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod int8;
#[cfg(target_arch = "x86_64")]
mod vector;

use rayon::prelude::*;

use super::{Engine, KernelElement, reference};
pub(super) use int8::offset as int8_offset;
#[cfg(target_arch = "x86_64")]
use vector::{Vector, WORD_COLUMNS, WORD_VALUES, interleave_groups};

/// Parts of a block of rows that are read side by side.
#[cfg(target_arch = "x86_64")]
const STREAMS: usize = 4;

/// Tokens multiplied in one pass over the weight.
#[cfg(target_arch = "x86_64")]
const TOKENS: usize = 4;

/// How far ahead of its reading a stream is fetched, in bytes.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 1024;

/// Rows of a compressed weight.
#[derive(Debug)]
pub(super) struct SparseBlock<'a, T> {
    /// Rows.
    pub rows: usize,
    /// `[rows, 2 * groups]`.
    pub values: &'a [T],
    /// `[rows, words]`.
    pub meta: &'a [u32],
    /// Values in a row.
    pub row_values: usize,
    /// Metadata words in a row.
    pub row_words: usize,
}

/// Rows of a dense weight.
#[derive(Debug)]
pub(super) struct DenseBlock<'a, T> {
    /// Rows.
    pub rows: usize,
    /// `[rows, cols]`.
    pub values: &'a [T],
    /// Columns.
    pub cols: usize,
}

impl<T> Clone for SparseBlock<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SparseBlock<'_, T> {}
impl<T> Clone for DenseBlock<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DenseBlock<'_, T> {}

impl<T> SparseBlock<'_, T> {
    fn slice(&self, rows: std::ops::Range<usize>) -> Self {
        SparseBlock {
            rows: rows.len(),
            values: &self.values[rows.start * self.row_values..rows.end * self.row_values],
            meta: &self.meta[rows.start * self.row_words..rows.end * self.row_words],
            ..*self
        }
    }
}

impl<T> DenseBlock<'_, T> {
    fn slice(&self, rows: std::ops::Range<usize>) -> Self {
        DenseBlock { rows: rows.len(), values: &self.values[rows.start * self.cols..rows.end * self.cols], ..*self }
    }
}

/// Rows of a weight in whatever form, that a thread can take a part of.
pub(super) trait Block: Copy + Send + Sync {
    /// An activation: f32, or i8 for integer kernels.
    type Activation: Sync;
    /// A dot product: f32, or i32 for integer kernels.
    type Sum: Copy + Default + Send;
    /// How many rows it has.
    fn rows(&self) -> usize;
    /// Some of its rows.
    fn part(&self, rows: std::ops::Range<usize>) -> Self;
    /// One token's activations in the order that the engine's kernel wants.
    fn prepare(&self, engine: Engine, x: &[Self::Activation]) -> Vec<Self::Activation>;
    /// Multiplies: `out[row * tokens + token]`, for prepared activations.
    fn multiply(self, engine: Engine, x: &[Vec<Self::Activation>], out: &mut [Self::Sum]);
}

/// `x · Wᵀ` for few tokens: `[out_features, tokens]`, row-major. `x` is `[tokens, in_features]`.
pub(super) fn product<B: Block>(engine: Engine, block: B, x: &[B::Activation], tokens: usize) -> Vec<B::Sum> {
    let mut out = vec![B::Sum::default(); block.rows() * tokens];
    let in_features = x.len() / tokens.max(1);
    if out.is_empty() || in_features == 0 {
        return out;
    }
    let x: Vec<_> = x.chunks(in_features).map(|x| block.prepare(engine, x)).collect();
    // A few parts per thread even out what else the machine is doing.
    let part = block.rows().div_ceil(4 * rayon::current_num_threads()).max(16);
    out.par_chunks_mut(part * tokens).enumerate().for_each(|(i, out)| {
        let rows = i * part..(i * part + part).min(block.rows());
        block.part(rows).multiply(engine, &x, out);
    });
    out
}

impl<T: KernelElement> Block for SparseBlock<'_, T> {
    type Activation = f32;
    type Sum = f32;

    fn rows(&self) -> usize {
        self.rows
    }

    fn part(&self, rows: std::ops::Range<usize>) -> Self {
        self.slice(rows)
    }

    fn prepare(&self, engine: Engine, x: &[f32]) -> Vec<f32> {
        match engine {
            Engine::Scalar => x.to_vec(),
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => interleave_groups(x, avx2::Avx2::LANES),
            #[cfg(target_arch = "x86_64")]
            Engine::Avx512 | Engine::Amx => interleave_groups(x, avx512::Avx512::LANES),
            #[cfg(not(target_arch = "x86_64"))]
            _ => x.to_vec(),
        }
    }

    fn multiply(self, engine: Engine, x: &[Vec<f32>], out: &mut [f32]) {
        match engine {
            Engine::Scalar => reference::sparse(self, x, out),
            // SAFETY: an Engine is only handed out where Engine::available lists it, so the CPU has the instructions;
            // `prepare` has completed the activations to whole words.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => unsafe { avx2::sparse(self, x, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx512 | Engine::Amx => unsafe { avx512::sparse(self, x, out) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => reference::sparse(self, x, out),
        }
    }
}

impl<T: KernelElement> Block for DenseBlock<'_, T> {
    type Activation = f32;
    type Sum = f32;

    fn rows(&self) -> usize {
        self.rows
    }

    fn part(&self, rows: std::ops::Range<usize>) -> Self {
        self.slice(rows)
    }

    fn prepare(&self, _: Engine, x: &[f32]) -> Vec<f32> {
        x.to_vec()
    }

    fn multiply(self, engine: Engine, x: &[Vec<f32>], out: &mut [f32]) {
        match engine {
            Engine::Scalar => reference::dense(self, x, out),
            // SAFETY: an Engine is only handed out where Engine::available lists it.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => unsafe { avx2::dense(self, x, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx512 | Engine::Amx => unsafe { avx512::dense(self, x, out) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => reference::dense(self, x, out),
        }
    }
}

/// Multiplies the rows of `block` with every token of `x`, as interleaved by [`interleave_groups`] for `V`'s lanes:
/// `out[row * tokens + token]`.
///
/// # Safety
/// The CPU has `V`'s instructions; each of `x` has `32 * row_words` elements.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn sparse_rows<V: Vector, T: KernelElement>(block: SparseBlock<'_, T>, x: &[Vec<f32>], out: &mut [f32]) {
    let rows = block.rows();
    let dot = |starts: [usize; STREAMS], first: usize, count: usize| {
        let x: [*const f32; TOKENS] = std::array::from_fn(|i| x[(first + i).min(x.len() - 1)].as_ptr());
        // SAFETY: `starts` are rows of the block; the activations have whole words.
        unsafe {
            match count {
                1 => widen_sums(sparse_dots::<V, T, STREAMS, 1>(block, starts, [x[0]])),
                2 => widen_sums(sparse_dots::<V, T, STREAMS, 2>(block, starts, [x[0], x[1]])),
                _ => sparse_dots::<V, T, STREAMS, TOKENS>(block, starts, x),
            }
        }
    };
    walk(rows, x.len(), out, dot);
}

/// As [`sparse_rows`], for a dense block and activations as they are.
///
/// # Safety
/// The CPU has `V`'s instructions; each of `x` has `cols` elements.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn dense_rows<V: Vector, T: KernelElement>(block: DenseBlock<'_, T>, x: &[Vec<f32>], out: &mut [f32]) {
    let rows = block.rows();
    let dot = |starts: [usize; STREAMS], first: usize, count: usize| {
        let x: [*const f32; TOKENS] = std::array::from_fn(|i| x[(first + i).min(x.len() - 1)].as_ptr());
        // SAFETY: `starts` are rows of the block; the activations have its columns.
        unsafe {
            match count {
                1 => widen_sums(dense_dots::<V, T, STREAMS, 1>(block, starts, [x[0]])),
                2 => widen_sums(dense_dots::<V, T, STREAMS, 2>(block, starts, [x[0], x[1]])),
                _ => dense_dots::<V, T, STREAMS, TOKENS>(block, starts, x),
            }
        }
    };
    walk(rows, x.len(), out, dot);
}

#[cfg(target_arch = "x86_64")]
fn widen_sums<S: Copy + Default, const N: usize>(sums: [[S; N]; STREAMS]) -> [[S; TOKENS]; STREAMS] {
    sums.map(|s| std::array::from_fn(|i| s.get(i).copied().unwrap_or_default()))
}

/// Walks `rows` in [`STREAMS`] parallel streams and the tokens in runs of up to [`TOKENS`]. `dot(rows, first, count)`
/// multiplies one row of each stream with `count` tokens from `first` on. A stream that has ended repeats its last row.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn walk<S: Copy>(
    rows: usize,
    tokens: usize,
    out: &mut [S],
    dot: impl Fn([usize; STREAMS], usize, usize) -> [[S; TOKENS]; STREAMS],
) {
    let length = rows.div_ceil(STREAMS);
    let mut first = 0;
    while first < tokens {
        let count = match tokens - first {
            1 => 1,
            2 => 2,
            more => more.min(TOKENS),
        };
        for step in 0..length {
            let starts: [usize; STREAMS] = std::array::from_fn(|s| (s * length + step).min(rows - 1));
            let sums = dot(starts, first, count);
            for (row, sums) in starts.into_iter().zip(sums) {
                out[row * tokens + first..][..count].copy_from_slice(&sums[..count]);
            }
        }
        first += count;
    }
}

/// Dot products of `R` rows with `N` tokens.
///
/// # Safety
/// The CPU has `V`'s instructions; `rows` are rows of the block; each of `x` is valid for `32 * row_words` elements.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn sparse_dots<V: Vector, T: KernelElement, const R: usize, const N: usize>(
    block: SparseBlock<'_, T>,
    rows: [usize; R],
    x: [*const f32; N],
) -> [[f32; N]; R] {
    // SAFETY: all offsets below stay inside the rows, whose lengths the block's fields give; prefetching may point anywhere.
    unsafe {
        let values = rows.map(|row| block.values.as_ptr().add(row * block.row_values));
        let meta = rows.map(|row| block.meta.as_ptr().add(row * block.row_words));
        let mut sums = [[V::zero(); N]; R];
        let full = block.row_values / WORD_VALUES;
        for word in 0..full {
            for r in 0..R {
                let values = values[r].add(word * WORD_VALUES);
                prefetch(values.cast::<u8>().wrapping_add(AHEAD));
                sparse_word::<V, T, N>(values, *meta[r].add(word), x.map(|x| x.add(word * WORD_COLUMNS)), &mut sums[r]);
            }
        }
        let tail = block.row_values % WORD_VALUES;
        if tail > 0 {
            for r in 0..R {
                let mut last = [T::ZERO; WORD_VALUES];
                std::ptr::copy_nonoverlapping(values[r].add(full * WORD_VALUES), last.as_mut_ptr(), tail);
                sparse_word::<V, T, N>(
                    last.as_ptr(),
                    *meta[r].add(full),
                    x.map(|x| x.add(full * WORD_COLUMNS)),
                    &mut sums[r],
                );
            }
        }
        sums.map(|s| s.map(|v| v.sum()))
    }
}

/// Adds the products of one metadata word's values with `N` tokens.
///
/// # Safety
/// The CPU has `V`'s instructions; `values` is valid for 16 elements, each of `x` for 32.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn sparse_word<V: Vector, T: KernelElement, const N: usize>(
    values: *const T,
    word: u32,
    x: [*const f32; N],
    sums: &mut [V; N],
) {
    // SAFETY: the caller's.
    unsafe {
        let w = V::widen(values);
        for n in 0..N {
            let (even, odd) = (V::load(x[n]), V::load(x[n].add(V::LANES)));
            sums[n] = V::pick::<0>(even, odd, word).multiply_add(w, sums[n]);
        }
        if V::LANES < WORD_VALUES {
            let w = V::widen(values.add(V::LANES));
            for n in 0..N {
                let x = x[n].add(2 * V::LANES);
                let (even, odd) = (V::load(x), V::load(x.add(V::LANES)));
                sums[n] = V::pick::<1>(even, odd, word).multiply_add(w, sums[n]);
            }
        }
    }
}

/// Dot products of `R` rows with `N` tokens.
///
/// # Safety
/// The CPU has `V`'s instructions; `rows` are rows of the block; each of `x` is valid for `cols` elements.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn dense_dots<V: Vector, T: KernelElement, const R: usize, const N: usize>(
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
            let x = x.map(|x| V::load(x.add(col)));
            for r in 0..R {
                if col % per_line == 0 {
                    prefetch(values[r].add(col).cast::<u8>().wrapping_add(AHEAD));
                }
                let w = V::widen(values[r].add(col));
                for n in 0..N {
                    sums[r][n] = w.multiply_add(x[n], sums[r][n]);
                }
            }
            col += V::LANES;
        }
        let mut out = sums.map(|s| s.map(|v| v.sum()));
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

/// Asks for a cache line.
///
/// # Safety
/// The CPU has SSE; any address will do.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn prefetch(p: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
}
