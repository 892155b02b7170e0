//! More tokens than a pass has, by a 2:4 weight: what each pass would expand, the indices of a strip, is expanded once and stored.
//!
//! Expanding in the loop costs a pass of sixteen tokens a quarter more time (measured on Zen 4). A strip's stored indices are as large as its values and stay in L2
//! beside it and the activations of some passes, which all strips meet before the next tokens do.

use std::{arch::x86_64::*, ops::Range};

use half::bf16;

use super::{
    super::{
        decode::strips::{Block, StripKernel, passes},
        scratch::Scratch,
        strips::{ROWS, Strip, StripsRef},
    },
    LANES,
    sparse::{Indices, Pairs, Positions, sums},
};

/// Bytes of activations that stay in L2 while strips meet them.
const CACHED: usize = 512 << 10;

/// The stored indices of a strip, a register for each line.
#[derive(Clone, Copy)]
struct Stored(*const u16);

// SAFETY: a register is read of those that `expand` has stored, one for each line of the strip.
unsafe impl Indices for Stored {
    #[inline(always)]
    unsafe fn of_line(self, _: *const u32, _: usize, line: usize) -> __m512i {
        // SAFETY: AVX-512 is there and the strip has the line, as the trait requires, so it has a register.
        unsafe { _mm512_load_si512(self.0.add(line * LANES).cast()) }
    }
}

/// Stores the indices of a strip's lines.
///
/// # Safety
/// The CPU has AVX-512 (F, BW) and VBMI.
#[inline(always)]
unsafe fn expand(strip: Strip<'_, bf16>, indices: &mut [u16]) -> Stored {
    assert!(indices.len() == strip.lines() * LANES);
    let start = indices.as_mut_ptr();
    for block in Block::<bf16>::of_strip(strip.lines()) {
        for i in 0..block.count {
            let line = block.first + i;
            // SAFETY: AVX-512 with VBMI is there, as this function requires; the block is the strip's and has a line `i`, for which `indices` have a register.
            unsafe {
                let (_, codes) = block.line(strip.as_ptr(), i);
                _mm512_storeu_si512(start.add(line * LANES).cast(), Positions.of_line(codes, i, line));
            }
        }
    }
    Stored(start)
}

/// Multiplies some strips with all tokens: `[strip, token, ROWS]`.
///
/// # Safety
/// The CPU has AVX-512 (F, BW), VBMI and AVX512_BF16; the activations are interleaved for the passes of [`Pairs`].
#[inline(always)]
pub(super) unsafe fn multiply(
    weight: StripsRef<'_, bf16>,
    range: Range<usize>,
    x: &[bf16],
    stride: usize,
    out: &mut [f32],
) {
    let tokens = x.len() / stride;
    assert!(stride >= weight.padded_cols().next_multiple_of(LANES) && out.len() == range.len() * tokens * ROWS);
    let Some(lines) = range.clone().next().map(|strip| weight.strip(strip).lines()) else { return };
    let mut indices = Scratch::take(lines * LANES);
    let all = passes(tokens, Pairs::TOKENS).len();
    let block = (CACHED / (Pairs::TOKENS * stride * size_of::<bf16>())).max(1);
    for first in (0..all).step_by(block) {
        for (strip, out) in range.clone().zip(out.chunks_exact_mut(tokens * ROWS)) {
            let strip = weight.strip(strip);
            // SAFETY: the CPU has the instructions, as this function requires.
            let indices = unsafe { expand(strip, &mut indices) };
            for pass in passes(tokens, Pairs::TOKENS).skip(first).take(block) {
                let x = x[pass.start * stride..pass.end * stride].as_ptr();
                let out = &mut out[pass.start * ROWS..pass.end * ROWS];
                macro_rules! cases {
                    ($($n:literal)*) => {
                        match pass.len() {
                            $($n => {
                                let out = out.as_mut_ptr();
                                // SAFETY: the CPU has the instructions, as this function requires; `x` and `out` have `$n` tokens, by the slicing above, and `stride` covers
                                // whole blocks, by the assertion; the indices are the strip's.
                                unsafe { sums::<1, $n, _>([strip], indices, x, [std::array::from_fn(|n| out.add(n * ROWS))]) }
                            })*
                            _ => unreachable!("more than {} tokens are passes of more than half as many", Pairs::TOKENS),
                        }
                    };
                }
                cases!(8 9 10 11 12 13 14 15 16);
            }
        }
    }
}
