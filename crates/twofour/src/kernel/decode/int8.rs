//! Int8 decode: i8 weights, i8 activations, sums in i32. Integer sums are exact, so every engine gives the same.

#[cfg(target_arch = "x86_64")]
use std::marker::PhantomData;

use super::super::engine::Cpu;
#[cfg(target_arch = "x86_64")]
use super::{
    super::{
        dense_block::DenseBlock,
        strips::{ROWS, Strip},
        vector::{ByteVector, avx2, avx512, prefetch},
    },
    dense::{self, RowKernel, STREAMS},
    strips::{Block, StripKernel},
};

/// The longest register, to which the activations of any kernel are completed.
const LONGEST: usize = 64;

/// Activations, `[tokens, features]`, as a CPU's kernels want them: each token completed to whole registers with what stands for
/// zero. Also what the sums have too much for each unit of the row's sum of weights.
pub(in super::super) fn prepare(cpu: Cpu, x: &[i8], features: usize) -> (Vec<i8>, i32) {
    let offset = match cpu {
        #[cfg(target_arch = "x86_64")]
        Cpu::Avx2(_) => avx2::Bytes::OFFSET,
        #[cfg(target_arch = "x86_64")]
        Cpu::Avx512(_) | Cpu::Amx(_) => avx512::Bytes::OFFSET,
        Cpu::Scalar => 0,
    };
    if features == 0 {
        // Nothing is multiplied, so nothing is too much.
        return (Vec::new(), 0);
    }
    let stride = features.next_multiple_of(LONGEST);
    // Adding 128 to a byte flips its top bit.
    let shift = |v: i8| (i32::from(v) + offset) as i8;
    let mut out = vec![shift(0); x.len() / features * stride];
    for (x, out) in x.chunks_exact(features).zip(out.chunks_exact_mut(stride)) {
        for (x, out) in x.iter().zip(out) {
            *out = shift(*x);
        }
    }
    (out, offset)
}

/// The kernel of strips for the vectors `V`; sums have `V::OFFSET` times the row's sum still in them.
#[cfg(target_arch = "x86_64")]
pub(super) struct BytesKernel<V>(PhantomData<V>);

// SAFETY: `sums` reads the strips' lines and eight activations for each.
#[cfg(target_arch = "x86_64")]
unsafe impl<V: ByteVector> StripKernel for BytesKernel<V> {
    type Strip<'a> = Strip<'a, i8>;
    type Activation = i8;
    type Sum = i32;

    const TOKENS: usize = if V::BYTES == 4 * ROWS { 4 } else { 3 };
    const SUMS: usize = if V::BYTES == 4 * ROWS { 16 } else { 6 };

    #[inline(always)]
    unsafe fn sums<const S: usize, const N: usize>(
        strips: [Strip<'_, i8>; S],
        x: *const i8,
        stride: usize,
        out: [[*mut i32; N]; S],
    ) {
        // SAFETY: all reads are inside the strips and the activations; prefetching may point anywhere.
        unsafe {
            let x: [_; N] = std::array::from_fn(|n| x.add(n * stride));
            let (mut low, mut high) = ([[V::zero(); N]; S], [[V::zero(); N]; S]);
            let start = strips.map(|strip| strip.as_ptr());
            for block in Block::<i8>::of_strip(strips[0].lines()) {
                for strip in start {
                    prefetch(strip.wrapping_add(block.codes + V::AHEAD));
                }
                for i in 0..block.count {
                    let mut eight = [V::zero(); N];
                    for n in 0..N {
                        eight[n] = V::splat_eight(x[n].add(8 * (block.first + i)));
                    }
                    for s in 0..S {
                        let (values, codes) = block.line(start[s], i);
                        prefetch(values.cast::<u8>().wrapping_add(V::AHEAD));
                        let (places, w) = (V::places::<0>(codes), V::load(values));
                        for n in 0..N {
                            low[s][n] = eight[n].pick(places).dot(w, low[s][n]);
                        }
                        if V::BYTES < 4 * ROWS {
                            let (places, w) = (V::places::<1>(codes), V::load(values.add(V::BYTES)));
                            for n in 0..N {
                                high[s][n] = eight[n].pick(places).dot(w, high[s][n]);
                            }
                        }
                    }
                }
            }
            for s in 0..S {
                for n in 0..N {
                    low[s][n].store(out[s][n]);
                    if V::BYTES < 4 * ROWS {
                        high[s][n].store(out[s][n].add(V::BYTES / 4));
                    }
                }
            }
        }
    }
}

/// A dense int8 weight for the vectors `V`.
#[cfg(target_arch = "x86_64")]
struct DenseKernel<'a, V>(DenseBlock<'a, i8>, PhantomData<V>);

#[cfg(target_arch = "x86_64")]
impl<V> Clone for DenseKernel<'_, V> {
    fn clone(&self) -> Self {
        *self
    }
}
#[cfg(target_arch = "x86_64")]
impl<V> Copy for DenseKernel<'_, V> {}

// SAFETY: `dense_dots` reads the given rows and whole registers of activations, to which they are completed.
#[cfg(target_arch = "x86_64")]
unsafe impl<V: ByteVector> RowKernel for DenseKernel<'_, V> {
    type Activation = i8;
    type Sum = i32;

    const TOKENS: usize = if V::BYTES == 64 { 4 } else { 2 };

    fn rows(&self) -> usize {
        self.0.rows
    }

    #[inline(always)]
    unsafe fn dots<const N: usize>(self, rows: [usize; STREAMS], x: [*const i8; N]) -> [[i32; N]; STREAMS] {
        // SAFETY: the CPU has `V`'s instructions, `rows` are rows of the weight and `x` tokens' activations, as the trait requires.
        unsafe { dense_dots::<V, STREAMS, N>(self.0, rows, x) }
    }
}

/// Multiplies a dense block with every token of `x`, as [`prepare`] made it: `[strip, token, ROWS]`, with `V::OFFSET` times the
/// row's sum still in it.
///
/// # Safety
/// The CPU has `V`'s instructions.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn multiply_dense<V: ByteVector>(
    block: DenseBlock<'_, i8>,
    x: &[i8],
    stride: usize,
    out: &mut [i32],
) {
    assert!(stride >= block.cols.next_multiple_of(V::BYTES));
    // SAFETY: the CPU has `V`'s instructions, as this function requires; each token has whole registers of activations, by the assertion.
    unsafe { dense::walk(DenseKernel::<V>(block, PhantomData), x, stride, out) }
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
        let full = block.cols / V::BYTES;
        for i in 0..full {
            let mut activations = [V::zero(); N];
            for n in 0..N {
                activations[n] = V::load(x[n].add(V::BYTES * i));
            }
            for r in 0..R {
                let values = values[r].add(V::BYTES * i);
                prefetch(values.cast::<u8>().wrapping_add(dense::AHEAD));
                let w = V::load(values);
                for n in 0..N {
                    sums[r][n] = activations[n].dot(w, sums[r][n]);
                }
            }
        }
        let tail = block.cols % V::BYTES;
        if tail > 0 {
            for r in 0..R {
                let mut last = [0i8; LONGEST];
                std::ptr::copy_nonoverlapping(values[r].add(V::BYTES * full), last.as_mut_ptr(), tail);
                let w = V::load(last.as_ptr());
                for n in 0..N {
                    sums[r][n] = V::load(x[n].add(V::BYTES * full)).dot(w, sums[r][n]);
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
