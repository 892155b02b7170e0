//! A dense weight, row by row: the contender.
//!
//! A register holds 32 columns of a row, another those of a token; `vdpbf16ps` adds the products of both halves. Rows and tokens are walked as for f32.

use std::{arch::x86_64::*, ops::Range};

use half::bf16;

use super::{
    super::{
        arguments::Sums,
        decode::{
            self, Factor,
            dense::{AHEAD, RowKernel, STREAMS, walk},
        },
        dense_block::DenseBlock,
        engine::{Cpu, HasAvx512},
        scratch::Scratch,
        vector::prefetch,
    },
    LANES,
};

/// A dense weight, and the proof that the CPU has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Weight<'a> {
    pub(super) block: DenseBlock<'a, bf16>,
    pub(super) has: HasAvx512,
}

/// `x · Wᵀ`, `x` `[tokens, cols]`.
pub(super) fn product(cpu: Cpu, weight: Weight<'_>, x: &[bf16], tokens: usize) -> Sums<f32> {
    decode::product(cpu, weight, &complete(x, tokens, weight.block.cols), tokens)
}

/// The activations of `[tokens, cols]`, each token completed with zeros: to whole registers, and to an odd number of cache lines, so that tokens do not compete for a set of L1.
fn complete(x: &[bf16], tokens: usize, cols: usize) -> Scratch<bf16> {
    if cols == 0 {
        return Scratch::take(0);
    }
    let stride = (cols.div_ceil(LANES) | 1) * LANES;
    let mut out = Scratch::take(tokens * stride);
    for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(stride)) {
        out[..cols].copy_from_slice(x);
        out[cols..].fill(bf16::ZERO);
    }
    out
}

impl Factor for Weight<'_> {
    type Activation = bf16;
    type Sum = f32;

    fn rows(&self) -> usize {
        self.block.rows
    }

    fn bytes(&self) -> usize {
        size_of_val(self.block.values)
    }

    fn multiply(&self, _: Cpu, strips: Range<usize>, x: &[bf16], stride: usize, out: &mut [f32]) {
        let HasAvx512 { .. } = self.has;
        // SAFETY: a `HasAvx512` exists only where detection found the instructions.
        unsafe { multiply(self.block.strips(strips), x, stride, out) }
    }
}

/// Multiplies all rows with every token of `x`, as [`complete`] stores them: `[strip, token, ROWS]`.
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ) and AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")]
unsafe fn multiply(block: DenseBlock<'_, bf16>, x: &[bf16], stride: usize, out: &mut [f32]) {
    assert!(stride >= block.cols.next_multiple_of(LANES));
    // SAFETY: the CPU has the instructions, as this function requires; a token has whole registers of activations, by the assertion.
    unsafe { walk(Rows(block), x, stride, out) }
}

/// The kernel of rows.
#[derive(Clone, Copy)]
struct Rows<'a>(DenseBlock<'a, bf16>);

// SAFETY: `dots` reads the given rows and whole registers of activations, to which they are completed.
unsafe impl RowKernel for Rows<'_> {
    type Activation = bf16;
    type Sum = f32;

    const TOKENS: usize = 4;

    fn rows(&self) -> usize {
        self.0.rows
    }

    #[inline(always)]
    unsafe fn dots<const N: usize>(self, rows: [usize; STREAMS], x: [*const bf16; N]) -> [[f32; N]; STREAMS] {
        let cols = self.0.cols;
        // SAFETY: the CPU has the instructions and `rows` are rows of the weight, as the trait requires; a last, incomplete register is read by a mask, and those of
        // activations are complete. Prefetching may point anywhere.
        unsafe {
            let values = rows.map(|row| self.0.values.as_ptr().add(row * cols));
            let mut sums = [[_mm512_setzero_ps(); N]; STREAMS];
            for col in (0..cols).step_by(LANES) {
                let present = match cols - col {
                    left @ 0..LANES => (1u32 << left) - 1,
                    _ => u32::MAX,
                };
                let mut activations = [_mm512_setzero_si512(); N];
                for n in 0..N {
                    activations[n] = _mm512_loadu_si512(x[n].add(col).cast());
                }
                for r in 0..STREAMS {
                    prefetch(values[r].add(col).cast::<u8>().wrapping_add(AHEAD));
                    let w = super::pairs(_mm512_maskz_loadu_epi16(present, values[r].add(col).cast()));
                    for n in 0..N {
                        sums[r][n] = _mm512_dpbf16_ps(sums[r][n], w, super::pairs(activations[n]));
                    }
                }
            }
            let mut out = [[0.0; N]; STREAMS];
            for r in 0..STREAMS {
                for n in 0..N {
                    out[r][n] = _mm512_reduce_add_ps(sums[r][n]);
                }
            }
            out
        }
    }
}
