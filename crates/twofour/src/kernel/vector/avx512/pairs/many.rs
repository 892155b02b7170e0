//! More tokens than a pass has, by a 2:4 weight: what each pass would expand, the indices of a strip, is expanded once
//! and stored.
//!
//! Expanding in the loop costs a pass of sixteen tokens a quarter more time (measured on Zen 4). A strip's stored
//! indices are as large as its values and stay in L2 beside it and the activations of some passes, which all strips
//! meet before the next tokens do.

use std::{arch::x86_64::*, ops::Range};

use half::bf16;

use super::{
    LANES,
    sparse::{Pairs, expanded, sums},
};
use crate::kernel::{
    few::strips::passes,
    format::{Block, Format, blocks},
    scratch::Scratch,
    strips::{ROWS, Strip, StripsRef},
    vector::{Has, Vector, Work},
};

/// Bytes of activations that stay in L2 while strips meet them.
const CACHED: usize = 512 << 10;

/// Stores the indices of a strip's lines, a register for each.
///
/// # Safety
/// The CPU has AVX-512 (F, BW) and VBMI.
#[inline(always)]
unsafe fn expand(strip: Strip<'_, Pairs>, indices: &mut [u16]) {
    let lines = strip.lines();
    assert!(indices.len() == lines * LANES);
    let (start, indices) = (strip.as_ptr(), indices.as_mut_ptr());
    for Block { start: block, first, count } in blocks::<Pairs>(lines) {
        for i in 0..count {
            // SAFETY: AVX-512 with VBMI is there, as this function requires; the strip has the block and its line, for
            // which `indices` have a register.
            unsafe {
                let codes = start.add(block).cast::<u32>().add(i * Pairs::CODE_WORDS);
                _mm512_storeu_si512(indices.add((first + i) * LANES).cast(), expanded(codes, i));
            }
        }
    }
}

/// Some strips, multiplied with all tokens: `[strip, token, ROWS]`. The activations are interleaved for the passes of
/// [`Pairs`].
pub(super) struct Many<'a> {
    pub(super) weight: StripsRef<'a, Pairs>,
    pub(super) range: Range<usize>,
    pub(super) x: &'a [bf16],
    pub(super) stride: usize,
    pub(super) out: &'a mut [f32],
}

impl Work for Many<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, _: Has<V>) {
        const { assert!(V::PAIRS.is_some()) };
        let Self { weight, range, x, stride, out } = self;
        let tokens = x.len() / stride;
        assert!(
            stride >= weight.shape.padded_cols().next_multiple_of(LANES) && out.len() == range.len() * tokens * ROWS
        );
        let Some(lines) = range.clone().next().map(|strip| weight.strip(strip).lines()) else { return };
        let mut indices = Scratch::take(lines * LANES);
        let all = passes(tokens, Pairs::TOKENS).len();
        let block = (CACHED / (Pairs::TOKENS * stride * size_of::<bf16>())).max(1);
        for first in (0..all).step_by(block) {
            for (strip, out) in range.clone().zip(out.chunks_exact_mut(tokens * ROWS)) {
                let strip = weight.strip(strip);
                // SAFETY: there is proof of AVX-512 with VBMI and BF16, which alone has these products.
                unsafe { expand(strip, &mut indices) };
                for pass in passes(tokens, Pairs::TOKENS).skip(first).take(block) {
                    let x = x[pass.start * stride..pass.end * stride].as_ptr();
                    let out = &mut out[pass.start * ROWS..pass.end * ROWS];
                    macro_rules! cases {
                        ($($n:literal)*) => {
                            match pass.len() {
                                $($n => {
                                    let (out, indices) = (out.as_mut_ptr(), indices.as_ptr());
                                    // SAFETY: there is proof of the instructions; `x` and `out` have `$n` tokens, by
                                    // the slicing above, and `stride` covers whole blocks, by the assertion; the
                                    // indices are the strip's.
                                    unsafe { sums::<true, 1, $n>([strip], indices, x, [std::array::from_fn(|n| out.add(n * ROWS))]) }
                                })*
                                _ => unreachable!("more than {} tokens are passes of more than half as \
                                                   many", Pairs::TOKENS),
                            }
                        };
                    }
                    cases!(8 9 10 11 12 13 14 15 16);
                }
            }
        }
    }
}
