//! Int8 decode: i8 weights, i8 activations, sums in i32. Integer sums are exact, so every engine gives the same.

#[cfg(target_arch = "x86_64")]
use std::marker::PhantomData;

#[cfg(target_arch = "x86_64")]
use super::{AHEAD, RowKernel, STREAMS, avx2, avx512, prefetch, vector::WORD_COLUMNS, vector::WORD_VALUES, walk};
use super::{Block, DenseBlock, Engine, SparseBlock, reference};

/// A register of bytes, or of i32 sums of their products.
///
/// # Safety
/// Every method may be called only on a CPU that has the implementor's instructions, and pointers must be valid for
/// what is read.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe trait ByteVector: Copy {
    /// Metadata words whose kept values fill a register; a register holds `16 * WORDS` bytes.
    const WORDS: usize;

    /// What is added to activations to suit the instructions; the sums are corrected by it.
    const OFFSET: i32;

    /// Zeros.
    unsafe fn zero() -> Self;

    /// Loads `16 * WORDS` bytes.
    unsafe fn load(p: *const i8) -> Self;

    /// From [`ByteVector::WORDS`] metadata words, for each kept value its place among the 16 activations of four groups.
    unsafe fn indices(words: *const u32) -> Self;

    /// Picks activations: in each 128-bit block the first eight from `lower`, the others from `upper`.
    unsafe fn pick(lower: Self, upper: Self, indices: Self) -> Self;

    /// Adds products of activations (`self`) and weights to i32 sums.
    unsafe fn dot(self, w: Self, sums: Self) -> Self;

    /// The sum of the i32 lanes.
    unsafe fn sum(self) -> i32;
}

/// One token's activations for [`ByteVector::pick`]: of each register's worth of words first the lower 16 columns of each
/// word, then the upper. Completed with what stands for zero.
#[cfg(target_arch = "x86_64")]
fn interleave_halves<V: ByteVector>(x: &[i8]) -> Vec<i8> {
    let run = V::WORDS * WORD_COLUMNS;
    // Adding 128 to a byte flips its top bit.
    let shift = |v: i8| (i32::from(v) + V::OFFSET) as i8;
    let mut out = vec![shift(0); x.len().div_ceil(run) * run];
    for (r, x) in x.chunks(run).enumerate() {
        for (half, x) in x.chunks(16).enumerate() {
            let to = r * run + half % 2 * (run / 2) + half / 2 * 16;
            for (to, x) in out[to..].iter_mut().zip(x) {
                *to = shift(*x);
            }
        }
    }
    out
}

/// One token's activations, completed to whole registers.
#[cfg(target_arch = "x86_64")]
fn complete<V: ByteVector>(x: &[i8]) -> Vec<i8> {
    let shift = |v: i8| (i32::from(v) + V::OFFSET) as i8;
    let whole = x.len().next_multiple_of(V::WORDS * WORD_VALUES);
    x.iter().map(|v| shift(*v)).chain(std::iter::repeat(shift(0))).take(whole).collect()
}

impl Block for SparseBlock<'_, i8> {
    type Activation = i8;
    type Sum = i32;

    fn rows(&self) -> usize {
        self.rows
    }

    fn part(&self, rows: std::ops::Range<usize>) -> Self {
        self.slice(rows)
    }

    fn prepare(&self, engine: Engine, x: &[i8]) -> Vec<i8> {
        match engine {
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => interleave_halves::<avx2::Bytes>(x),
            #[cfg(target_arch = "x86_64")]
            Engine::Avx512 | Engine::Amx => interleave_halves::<avx512::Bytes>(x),
            _ => x.to_vec(),
        }
    }

    fn multiply(self, engine: Engine, x: &[Vec<i8>], out: &mut [i32]) {
        match engine {
            // SAFETY: an Engine is only handed out where Engine::available lists it, so the CPU has the instructions;
            // `prepare` has completed the activations.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => unsafe { avx2::sparse_bytes(self, x, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx512 | Engine::Amx => unsafe { avx512::sparse_bytes(self, x, out) },
            _ => reference::sparse_bytes(self, x, out),
        }
    }
}

impl Block for DenseBlock<'_, i8> {
    type Activation = i8;
    type Sum = i32;

    fn rows(&self) -> usize {
        self.rows
    }

    fn part(&self, rows: std::ops::Range<usize>) -> Self {
        self.slice(rows)
    }

    fn prepare(&self, engine: Engine, x: &[i8]) -> Vec<i8> {
        match engine {
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => complete::<avx2::Bytes>(x),
            #[cfg(target_arch = "x86_64")]
            Engine::Avx512 | Engine::Amx => complete::<avx512::Bytes>(x),
            _ => x.to_vec(),
        }
    }

    fn multiply(self, engine: Engine, x: &[Vec<i8>], out: &mut [i32]) {
        match engine {
            // SAFETY: as for the sparse block.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => unsafe { avx2::dense_bytes(self, x, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx512 | Engine::Amx => unsafe { avx512::dense_bytes(self, x, out) },
            _ => reference::dense_bytes(self, x, out),
        }
    }
}

/// A compressed int8 weight for the vectors `V`; activations as [`interleave_halves`] makes them.
#[cfg(target_arch = "x86_64")]
struct SparseKernel<'a, V>(SparseBlock<'a, i8>, PhantomData<V>);

/// A dense int8 weight for the vectors `V`; activations as [`complete`] makes them.
#[cfg(target_arch = "x86_64")]
struct DenseKernel<'a, V>(DenseBlock<'a, i8>, PhantomData<V>);

#[cfg(target_arch = "x86_64")]
impl<V> Clone for SparseKernel<'_, V> {
    fn clone(&self) -> Self {
        *self
    }
}
#[cfg(target_arch = "x86_64")]
impl<V> Copy for SparseKernel<'_, V> {}
#[cfg(target_arch = "x86_64")]
impl<V> Clone for DenseKernel<'_, V> {
    fn clone(&self) -> Self {
        *self
    }
}
#[cfg(target_arch = "x86_64")]
impl<V> Copy for DenseKernel<'_, V> {}

// SAFETY: `sparse_dots` reads the given rows and whole registers of activations, which is what interleaving completes to.
#[cfg(target_arch = "x86_64")]
unsafe impl<V: ByteVector> RowKernel for SparseKernel<'_, V> {
    type Activation = i8;
    type Sum = i32;

    fn rows(&self) -> usize {
        self.0.rows
    }

    #[inline(always)]
    unsafe fn dots<const N: usize>(self, rows: [usize; STREAMS], x: [*const i8; N]) -> [[i32; N]; STREAMS] {
        // SAFETY: the caller's.
        unsafe { sparse_dots::<V, STREAMS, N>(self.0, rows, x) }
    }
}

// SAFETY: `dense_dots` reads the given rows and whole registers of activations, to which they are completed.
#[cfg(target_arch = "x86_64")]
unsafe impl<V: ByteVector> RowKernel for DenseKernel<'_, V> {
    type Activation = i8;
    type Sum = i32;

    fn rows(&self) -> usize {
        self.0.rows
    }

    #[inline(always)]
    unsafe fn dots<const N: usize>(self, rows: [usize; STREAMS], x: [*const i8; N]) -> [[i32; N]; STREAMS] {
        // SAFETY: the caller's.
        unsafe { dense_dots::<V, STREAMS, N>(self.0, rows, x) }
    }
}

/// Multiplies the rows of `block` with every token of `x`, as `prepare` made it: `out[row * tokens + token]`, with
/// `V::OFFSET` times the row's sum still in it.
///
/// # Safety
/// The CPU has `V`'s instructions; each of `x` is interleaved for `V` and complete.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn sparse_rows<V: ByteVector>(block: SparseBlock<'_, i8>, x: &[Vec<i8>], out: &mut [i32]) {
    // SAFETY: the caller's.
    unsafe { walk(SparseKernel::<V>(block, PhantomData), x, out) }
}

/// As [`sparse_rows`], for a dense block.
///
/// # Safety
/// The CPU has `V`'s instructions; each of `x` is complete.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn dense_rows<V: ByteVector>(block: DenseBlock<'_, i8>, x: &[Vec<i8>], out: &mut [i32]) {
    // SAFETY: the caller's.
    unsafe { walk(DenseKernel::<V>(block, PhantomData), x, out) }
}

/// A register of each token's activations, from `at` on.
///
/// # Safety
/// The CPU has `V`'s instructions; a register can be read there.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn load<V: ByteVector, const N: usize>(x: [*const i8; N], at: usize) -> [V; N] {
    // SAFETY: the caller's.
    unsafe {
        let mut out = [V::zero(); N];
        for n in 0..N {
            out[n] = V::load(x[n].add(at));
        }
        out
    }
}

/// Two adjacent registers of each token's activations, from `at` on.
///
/// # Safety
/// The CPU has `V`'s instructions; two registers can be read there.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn load_pairs<V: ByteVector, const N: usize>(x: [*const i8; N], at: usize) -> [(V, V); N] {
    // SAFETY: the caller's.
    unsafe {
        let mut out = [(V::zero(), V::zero()); N];
        for n in 0..N {
            let lower = x[n].add(at);
            out[n] = (V::load(lower), V::load(lower.add(V::WORDS * WORD_VALUES)));
        }
        out
    }
}

/// Dot products of `R` rows with `N` tokens.
///
/// # Safety
/// The CPU has `V`'s instructions; `rows` are rows of the block; each of `x` is complete.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn sparse_dots<V: ByteVector, const R: usize, const N: usize>(
    block: SparseBlock<'_, i8>,
    rows: [usize; R],
    x: [*const i8; N],
) -> [[i32; N]; R] {
    // SAFETY: all offsets stay inside the rows; a last, incomplete register is read from copies.
    unsafe {
        let values = rows.map(|row| block.values.as_ptr().add(row * block.row_values));
        let meta = rows.map(|row| block.meta.as_ptr().add(row * block.row_words));
        let mut sums = [[V::zero(); N]; R];
        let step = V::WORDS * WORD_VALUES;
        let full = block.row_values / step;
        for i in 0..full {
            let x = load_pairs::<V, N>(x, 2 * step * i);
            for r in 0..R {
                let values = values[r].add(step * i);
                prefetch(values.cast::<u8>().wrapping_add(AHEAD));
                let (indices, w) = (V::indices(meta[r].add(V::WORDS * i)), V::load(values));
                for n in 0..N {
                    sums[r][n] = V::pick(x[n].0, x[n].1, indices).dot(w, sums[r][n]);
                }
            }
        }
        let tail = block.row_values % step;
        if tail > 0 {
            let x = load_pairs::<V, N>(x, 2 * step * full);
            for r in 0..R {
                let (mut last, mut words) = ([0i8; 64], [0u32; 4]);
                std::ptr::copy_nonoverlapping(values[r].add(step * full), last.as_mut_ptr(), tail);
                let left = block.row_words - V::WORDS * full;
                std::ptr::copy_nonoverlapping(meta[r].add(V::WORDS * full), words.as_mut_ptr(), left);
                let (indices, w) = (V::indices(words.as_ptr()), V::load(last.as_ptr()));
                for n in 0..N {
                    sums[r][n] = V::pick(x[n].0, x[n].1, indices).dot(w, sums[r][n]);
                }
            }
        }
        let mut out = [[0; N]; R];
        for r in 0..R {
            for n in 0..N {
                out[r][n] = sums[r][n].sum();
            }
        }
        out
    }
}

/// Dot products of `R` rows with `N` tokens.
///
/// # Safety
/// The CPU has `V`'s instructions; `rows` are rows of the block; each of `x` is complete.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn dense_dots<V: ByteVector, const R: usize, const N: usize>(
    block: DenseBlock<'_, i8>,
    rows: [usize; R],
    x: [*const i8; N],
) -> [[i32; N]; R] {
    // SAFETY: all offsets stay inside the rows; a last, incomplete register is read from a copy.
    unsafe {
        let values = rows.map(|row| block.values.as_ptr().add(row * block.cols));
        let mut sums = [[V::zero(); N]; R];
        let step = V::WORDS * WORD_VALUES;
        let full = block.cols / step;
        for i in 0..full {
            let x = load::<V, N>(x, step * i);
            for r in 0..R {
                let values = values[r].add(step * i);
                prefetch(values.cast::<u8>().wrapping_add(AHEAD));
                let w = V::load(values);
                for n in 0..N {
                    sums[r][n] = x[n].dot(w, sums[r][n]);
                }
            }
        }
        let tail = block.cols % step;
        if tail > 0 {
            let x = load::<V, N>(x, step * full);
            for r in 0..R {
                let mut last = [0i8; 64];
                std::ptr::copy_nonoverlapping(values[r].add(step * full), last.as_mut_ptr(), tail);
                let w = V::load(last.as_ptr());
                for n in 0..N {
                    sums[r][n] = x[n].dot(w, sums[r][n]);
                }
            }
        }
        let mut out = [[0; N]; R];
        for r in 0..R {
            for n in 0..N {
                out[r][n] = sums[r][n].sum();
            }
        }
        out
    }
}

/// What [`Block::multiply`] leaves in a sum for each unit of the row's sum of weights.
pub(in super::super) fn offset(engine: Engine) -> i32 {
    match engine {
        #[cfg(target_arch = "x86_64")]
        Engine::Avx2 => avx2::Bytes::OFFSET,
        #[cfg(target_arch = "x86_64")]
        Engine::Avx512 | Engine::Amx => avx512::Bytes::OFFSET,
        _ => 0,
    }
}
