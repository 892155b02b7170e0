//! A dense weight, row by row.
//!
//! A register holds 32 columns of a row, another those of a token; `vdpbf16ps` adds the products of both halves. Rows
//! and tokens are walked as for f32.

use std::arch::x86_64::*;

use half::bf16;

use super::{Avx512, LANES, sparse::Pairs};
use crate::kernel::{
    arguments::Sums,
    dense::Rows,
    few::{self, Size, rows::Walk},
    format::DenseFormat,
    scratch::Scratch,
    vector::{Has, Vector},
};

/// How far ahead of its reading a row is fetched, in bytes.
const AHEAD: usize = 1024;

/// `x · Wᵀ`, `x` `[tokens, cols]`.
pub(super) fn product(has: Has<Avx512>, weight: Rows<'_, bf16>, x: &[bf16], tokens: usize) -> Sums<f32> {
    let x = complete(x, tokens, weight.cols);
    let size = Size { rows: weight.rows, bytes: size_of_val(weight.values) };
    few::product(size, &x, tokens, |range, stride, out| {
        has.run(Walk::<Pairs> { weight: weight.strips(range), x: &x, stride, out });
    })
}

/// The activations of `[tokens, cols]`, each token completed with zeros: to whole registers, and to an odd number of
/// cache lines, so that tokens do not compete for a set of L1.
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

// SAFETY: `dots` reads the given rows and whole registers of activations, to which they are completed.
unsafe impl DenseFormat for Pairs {
    #[inline(always)]
    fn completed(cols: usize) -> usize {
        cols.next_multiple_of(LANES)
    }

    #[inline(always)]
    fn dense_tokens<V: Vector>() -> usize {
        4
    }

    /// `V` is [`Avx512`].
    #[inline(always)]
    unsafe fn dots<V: Vector, const R: usize, const N: usize>(
        weight: Rows<'_, bf16>,
        rows: [usize; R],
        x: [*const bf16; N],
    ) -> [[f32; N]; R] {
        const { assert!(V::PAIRS.is_some()) };
        // SAFETY: the CPU has the instructions and `rows` are rows of the weight, as the trait requires; a last,
        // incomplete register is read by a mask, and those of activations are complete. Prefetching may point anywhere.
        unsafe {
            let values = rows.map(|row| weight.values.as_ptr().add(row * weight.cols));
            let mut sums = [[_mm512_setzero_ps(); N]; R];
            for col in (0..weight.cols).step_by(LANES) {
                let present = match weight.cols - col {
                    left @ 0..LANES => (1u32 << left) - 1,
                    _ => u32::MAX,
                };
                let mut activations = [_mm512_setzero_si512(); N];
                for n in 0..N {
                    activations[n] = _mm512_loadu_si512(x[n].add(col).cast());
                }
                for r in 0..R {
                    Avx512::prefetch(values[r].add(col).cast::<u8>().wrapping_add(AHEAD));
                    let w = super::pairs(_mm512_maskz_loadu_epi16(present, values[r].add(col).cast()));
                    for n in 0..N {
                        sums[r][n] = _mm512_dpbf16_ps(sums[r][n], w, super::pairs(activations[n]));
                    }
                }
            }
            let mut out = [[0.0; N]; R];
            for r in 0..R {
                for n in 0..N {
                    out[r][n] = _mm512_reduce_add_ps(sums[r][n]);
                }
            }
            out
        }
    }
}
