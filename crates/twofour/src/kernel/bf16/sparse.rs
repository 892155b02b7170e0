//! A 2:4 weight in strips.
//!
//! A line of a strip is one register: the pairs of sixteen rows. One permutation (`vpermw`) of a token's activations picks for each row the pair that
//! it keeps, and one `vdpbf16ps` multiplies and adds. The register that is permuted holds 32 columns, which serve the eight lines of a block,
//! and the indices of a line serve all tokens of a pass. A pruned weight's activation is never picked.

use std::{
    arch::{asm, x86_64::*},
    ops::Range,
};

use bytemuck::Zeroable;
use half::bf16;

use super::{
    super::{
        arguments::Sums,
        decode::{
            self, Factor,
            strips::{Block, StripKernel, passes, walk},
        },
        engine::{Cpu, HasAvx512},
        scratch::Scratch,
        share::share_elements,
        strips::{Order, ROWS, Strip, StripsRef},
        vector::prefetch,
    },
    LANES, many,
};

/// How far ahead of its reading a strip is fetched, in bytes.
const AHEAD: usize = 1024;

/// A 2:4 weight, and the proof that the CPU has the instructions.
#[derive(Clone, Copy)]
pub(super) struct Weight<'a> {
    pub(super) strips: StripsRef<'a, bf16>,
    pub(super) has: HasAvx512,
}

/// `x · Wᵀ`, `x` `[tokens, cols]`.
pub(super) fn product(cpu: Cpu, weight: Weight<'_>, x: &[bf16], tokens: usize) -> Sums<f32> {
    decode::product(cpu, weight, &interleave(x, tokens, weight.strips.cols()), tokens)
}

/// The activations of `[tokens, cols]` in the order of [`Pairs`]: for each pass, register by register of columns, a register of each token. Completed with
/// zero columns.
fn interleave(x: &[bf16], tokens: usize, cols: usize) -> Scratch<bf16> {
    let stride = cols.next_multiple_of(LANES);
    let mut out = Scratch::take(tokens * stride);
    if out.is_empty() {
        return out;
    }
    let mut rest = &mut *out;
    let passes = passes(tokens, Pairs::TOKENS).map(|pass| {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(pass.len() * stride);
        rest = after;
        (pass, part)
    });
    share_elements(tokens * stride / LANES, passes, |(pass, out): (Range<usize>, &mut [bf16])| {
        for (token, x) in x[pass.start * cols..pass.end * cols].chunks_exact(cols).enumerate() {
            for (x, out) in x.chunks(LANES).zip(out.chunks_exact_mut(LANES).skip(token).step_by(pass.len())) {
                match (x.as_array::<LANES>(), out.as_mut_array::<LANES>()) {
                    // The usual case with a length that the compiler knows.
                    (Some(x), Some(out)) => *out = *x,
                    _ => {
                        let (kept, padding) = out.split_at_mut(x.len());
                        kept.copy_from_slice(x);
                        padding.fill(bf16::zeroed());
                    }
                }
            }
        }
    });
    out
}

impl Factor for Weight<'_> {
    type Activation = bf16;
    type Sum = f32;

    fn rows(&self) -> usize {
        self.strips.rows()
    }

    fn bytes(&self) -> usize {
        self.strips.bytes()
    }

    fn multiply(&self, _: Cpu, strips: Range<usize>, x: &[bf16], stride: usize, out: &mut [f32]) {
        let HasAvx512 { .. } = self.has;
        // SAFETY: a `HasAvx512` exists only where detection found the instructions; the activations are interleaved for the passes of `Pairs`.
        unsafe { multiply(self.strips, strips, x, stride, out) }
    }
}

/// Multiplies some strips with all tokens: `[strip, token, ROWS]`.
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ), VBMI and AVX512_BF16; the activations are interleaved for the passes of [`Pairs`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16")]
unsafe fn multiply(weight: StripsRef<'_, bf16>, range: Range<usize>, x: &[bf16], stride: usize, out: &mut [f32]) {
    // SAFETY: the CPU has the instructions and the activations are interleaved, as this function requires.
    unsafe {
        if x.len() / stride <= Pairs::TOKENS {
            walk::<Pairs, _>(weight, range, x, stride, out)
        } else {
            many::multiply(weight, range, x, stride, out)
        }
    }
}

/// The kernel of strips. The activations of a pass are `[stride / 32][tokens][32]`: a register is read at a fixed distance from one pointer, and no two compete for
/// a set of L1.
pub(super) struct Pairs;

// SAFETY: `sums` reads the strips' lines and, of each token, as many registers as the strips have blocks, which `stride` covers.
unsafe impl StripKernel for Pairs {
    type Strip<'a> = Strip<'a, bf16>;
    type Activation = bf16;
    type Sum = f32;

    const TOKENS: usize = 16;
    const SUMS: usize = 16;

    #[inline(always)]
    unsafe fn sums<const S: usize, const N: usize>(
        strips: [Strip<'_, bf16>; S],
        x: *const bf16,
        _: usize,
        out: [[*mut f32; N]; S],
    ) {
        // SAFETY: the CPU has the instructions and the pointers are valid, as the trait requires.
        unsafe { sums::<S, N, _>(strips, Positions, x, out) }
    }
}

/// Where the kernel finds the indices of a line.
///
/// # Safety
/// Implementations read no more than `codes`, the line's words of positions, and what they were made for: the lines of a strip.
pub(super) unsafe trait Indices: Copy {
    /// For each row of a line, the columns of its first and its second value among the block's 32. The line is the block's `i`th, `line` the strip's.
    ///
    /// # Safety
    /// The CPU has AVX-512 (F, BW) and VBMI; the strip has the line, and its words are at `codes`; `i` is less than 8.
    unsafe fn of_line(self, codes: *const u32, i: usize, line: usize) -> __m512i;
}

/// Indices that are expanded from the positions of the line.
#[derive(Clone, Copy)]
pub(super) struct Positions;

// SAFETY: two words are read at `codes`, which are a line's.
unsafe impl Indices for Positions {
    #[inline(always)]
    unsafe fn of_line(self, codes: *const u32, i: usize, _: usize) -> __m512i {
        /// Four times the line, in both halves of a word.
        static GROUPS: [u32; 8] = [0, 0x4_0004, 0x8_0008, 0xC_000C, 0x10_0010, 0x14_0014, 0x18_0018, 0x1C_001C];
        /// `positions & 3 | group`.
        const AND_OR: i32 = 0xEA;
        // SAFETY: AVX-512 with VBMI is there, `codes` are two words, and `GROUPS` has an element `i`, as the trait requires.
        unsafe {
            // Of the eight bits that start there, the lower two are a position.
            let starts = _mm512_load_si512(STARTS.0.as_ptr().cast());
            let positions =
                _mm512_multishift_epi64_epi8(starts, _mm512_set1_epi64(codes.cast::<i64>().read_unaligned()));
            let group = _mm512_set1_epi32(*GROUPS.get_unchecked(i) as i32);
            _mm512_ternarylogic_epi64::<AND_OR>(positions, _mm512_set1_epi16(3), group)
        }
    }
}

/// For each byte of a register of indices, where its bits start among the 64 of a line: row `r`'s first position at `2r`, its second at `32 + 2r`.
static STARTS: Starts = {
    let mut bytes = [0; 64];
    let mut row = 0;
    while row < ROWS {
        bytes[4 * row] = 2 * row as u8;
        bytes[4 * row + 2] = 32 + 2 * row as u8;
        row += 1;
    }
    Starts(bytes)
};

#[repr(align(64))]
struct Starts([u8; 64]);

/// Sums of `S` strips with the `N` tokens of a pass: `out[strip][token]` is valid for [`ROWS`] sums.
///
/// # Safety
/// The CPU has AVX-512 (F, BW), VBMI and AVX512_BF16; the strips are of one weight and `indices` were made for them; `x` has `N` registers for each of their blocks.
#[expect(clippy::needless_range_loop, reason = "the index is of sums and of activations")]
#[inline(always)]
pub(super) unsafe fn sums<const S: usize, const N: usize, I: Indices>(
    strips: [Strip<'_, bf16>; S],
    indices: I,
    x: *const bf16,
    out: [[*mut f32; N]; S],
) {
    const { assert!(<bf16 as Order>::BLOCK_LINES * 4 == LANES) };
    // SAFETY: all reads are inside the strips and the activations; prefetching may point anywhere.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); N]; S];
        let start = strips.map(|strip| strip.as_ptr());
        let mut x = x;
        for block in Block::<bf16>::of_strip(strips[0].lines()) {
            for strip in start {
                prefetch(strip.wrapping_add(block.codes + AHEAD));
            }
            for i in 0..block.count {
                let x = if S * N > 8 { hidden(x) } else { x };
                for s in 0..S {
                    let (values, codes) = block.line(start[s], i);
                    prefetch(values.cast::<u8>().wrapping_add(AHEAD));
                    let indices = indices.of_line(codes, i, block.first + i);
                    let values = super::pairs(_mm512_load_si512(values.cast()));
                    for n in 0..N {
                        let columns = _mm512_load_si512(x.add(n * LANES).cast());
                        let picked = super::pairs(_mm512_permutexvar_epi16(indices, columns));
                        sums[s][n] = _mm512_dpbf16_ps(sums[s][n], values, picked);
                    }
                }
            }
            x = x.add(N * LANES);
        }
        for s in 0..S {
            for n in 0..N {
                _mm512_storeu_ps(out[s][n], sums[s][n]);
            }
        }
    }
}

/// The same pointer, of which the compiler does not know that it is the same: it would keep all tokens' columns in registers from one line to the next, and spill sums.
#[expect(clippy::pointers_in_nomem_asm_block, reason = "the comment reads nothing through the pointer")]
#[inline(always)]
fn hidden<T>(mut pointer: *const T) -> *const T {
    // SAFETY: no instruction, only a comment.
    unsafe { asm!("/* {0} */", inout(reg) pointer, options(nomem, nostack, preserves_flags)) };
    pointer
}
