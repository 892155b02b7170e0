//! Few tokens: every weight is read once and the memory is what limits.
//!
//! The weight's rows are split among threads; within a thread, [`STREAMS`] parts of its rows are walked side by side,
//! each of them sequentially, so that the memory system sees a few long streams. Activations are picked by metadata (a shuffle inside 128-bit
//! blocks, whose index bits are those of the canonical metadata word) and multiplied with the kept values as they lie.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
mod int8;
#[cfg(target_arch = "x86_64")]
pub(super) mod vector;

#[cfg(target_arch = "x86_64")]
use std::marker::PhantomData;

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

/// A kernel that multiplies a few rows of a weight with a few tokens.
///
/// A trait and not a closure: LLVM must inline the kernel into a function that has the instructions enabled, or else every
/// intrinsic becomes a call, and only a function can be marked for that.
///
/// # Safety
/// Implementations read no rows but those given, and no more of an activation than its kernel's preparation made.
#[cfg(target_arch = "x86_64")]
unsafe trait RowKernel: Copy {
    /// What activations are made of.
    type Activation;
    /// What a dot product is.
    type Sum: Copy;

    /// How many rows the weight has.
    fn rows(&self) -> usize;

    /// Dot products of a row of each stream with `N` tokens.
    ///
    /// # Safety
    /// The CPU has the kernel's instructions; `rows` are rows of the weight; each of `x` is prepared for this kernel.
    unsafe fn dots<const N: usize>(
        self,
        rows: [usize; STREAMS],
        x: [*const Self::Activation; N],
    ) -> [[Self::Sum; N]; STREAMS];
}

/// Walks the rows in [`STREAMS`] parallel streams and the tokens in runs of up to [`TOKENS`]:
/// `out[row * tokens + token]`.
///
/// # Safety
/// The CPU has the kernel's instructions; each of `x` is prepared for this kernel.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn walk<K: RowKernel>(kernel: K, x: &[Vec<K::Activation>], out: &mut [K::Sum]) {
    let mut first = 0;
    while first < x.len() {
        // SAFETY: the caller's.
        first += unsafe {
            match x.len() - first {
                1 => pass::<K, 1>(kernel, x, first, out),
                2 => pass::<K, 2>(kernel, x, first, out),
                _ => pass::<K, TOKENS>(kernel, x, first, out),
            }
        };
    }
}

/// One pass over the weight: multiplies it with `N` tokens from `first` on, or as many as there are, and says how many. A
/// stream that has ended repeats its last row, a missing token the last one.
///
/// # Safety
/// As [`walk`]; there is a token `first`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn pass<K: RowKernel, const N: usize>(
    kernel: K,
    x: &[Vec<K::Activation>],
    first: usize,
    out: &mut [K::Sum],
) -> usize {
    let (tokens, rows) = (x.len(), kernel.rows());
    let count = N.min(tokens - first);
    let x: [*const K::Activation; N] = std::array::from_fn(|i| x[(first + i).min(tokens - 1)].as_ptr());
    let length = rows.div_ceil(STREAMS);
    for step in 0..length {
        let rows: [usize; STREAMS] = std::array::from_fn(|s| (s * length + step).min(rows - 1));
        // SAFETY: `rows` are rows of the weight; the rest is the caller's.
        let sums = unsafe { kernel.dots(rows, x) };
        for (row, sums) in rows.into_iter().zip(sums) {
            out[row * tokens + first..][..count].copy_from_slice(&sums[..count]);
        }
    }
    count
}

/// A compressed float weight for the vectors `V`; activations as [`interleave_groups`] makes them for its lanes.
#[cfg(target_arch = "x86_64")]
struct SparseKernel<'a, V, T>(SparseBlock<'a, T>, PhantomData<V>);

/// A dense float weight for the vectors `V`; activations as they are.
#[cfg(target_arch = "x86_64")]
struct DenseKernel<'a, V, T>(DenseBlock<'a, T>, PhantomData<V>);

#[cfg(target_arch = "x86_64")]
impl<V, T> Clone for SparseKernel<'_, V, T> {
    fn clone(&self) -> Self {
        *self
    }
}
#[cfg(target_arch = "x86_64")]
impl<V, T> Copy for SparseKernel<'_, V, T> {}
#[cfg(target_arch = "x86_64")]
impl<V, T> Clone for DenseKernel<'_, V, T> {
    fn clone(&self) -> Self {
        *self
    }
}
#[cfg(target_arch = "x86_64")]
impl<V, T> Copy for DenseKernel<'_, V, T> {}

// SAFETY: `sparse_dots` reads the given rows and `32 * row_words` activations, which is what interleaving completes to.
#[cfg(target_arch = "x86_64")]
unsafe impl<V: Vector, T: KernelElement> RowKernel for SparseKernel<'_, V, T> {
    type Activation = f32;
    type Sum = f32;

    fn rows(&self) -> usize {
        self.0.rows
    }

    #[inline(always)]
    unsafe fn dots<const N: usize>(self, rows: [usize; STREAMS], x: [*const f32; N]) -> [[f32; N]; STREAMS] {
        // SAFETY: the caller's.
        unsafe { sparse_dots::<V, T, STREAMS, N>(self.0, rows, x) }
    }
}

// SAFETY: `dense_dots` reads the given rows and `cols` activations.
#[cfg(target_arch = "x86_64")]
unsafe impl<V: Vector, T: KernelElement> RowKernel for DenseKernel<'_, V, T> {
    type Activation = f32;
    type Sum = f32;

    fn rows(&self) -> usize {
        self.0.rows
    }

    #[inline(always)]
    unsafe fn dots<const N: usize>(self, rows: [usize; STREAMS], x: [*const f32; N]) -> [[f32; N]; STREAMS] {
        // SAFETY: the caller's.
        unsafe { dense_dots::<V, T, STREAMS, N>(self.0, rows, x) }
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
    // SAFETY: the caller's.
    unsafe { walk(SparseKernel::<V, T>(block, PhantomData), x, out) }
}

/// As [`sparse_rows`], for a dense block and activations as they are.
///
/// # Safety
/// The CPU has `V`'s instructions; each of `x` has `cols` elements.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn dense_rows<V: Vector, T: KernelElement>(block: DenseBlock<'_, T>, x: &[Vec<f32>], out: &mut [f32]) {
    // SAFETY: the caller's.
    unsafe { walk(DenseKernel::<V, T>(block, PhantomData), x, out) }
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
        let mut out = [[0.0; N]; R];
        for r in 0..R {
            for n in 0..N {
                out[r][n] = sums[r][n].sum();
            }
        }
        out
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
