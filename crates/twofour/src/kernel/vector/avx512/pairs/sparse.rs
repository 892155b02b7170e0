//! A 2:4 weight in strips.
//!
//! A line of a strip is one register: the pairs of sixteen rows. One permutation (`vpermw`) of a token's activations
//! picks for each row the pair that it keeps, and one `vdpbf16ps` multiplies and adds. The register that is permuted
//! holds 32 columns, which serve the eight lines of a block, and the indices of a line serve all tokens of a pass. A
//! pruned weight's activation is never picked.

use std::{
    arch::{asm, x86_64::*},
    ops::Range,
};

use bytemuck::Zeroable;
use half::bf16;

use super::{Avx512, LANES, many::Many};
use crate::kernel::{
    aligned::CACHE_LINE,
    arguments::Sums,
    few::{
        self, Size,
        strips::{Walk, passes},
    },
    format::{Block, Format, blocks},
    scratch::Scratch,
    share::share_elements,
    strips::{ROWS, Strip, StripsRef},
    vector::{Has, Vector},
};

/// How far ahead of its reading a strip is fetched, in bytes.
const AHEAD: usize = 1024;

/// `x · Wᵀ`, `x` `[tokens, cols]`.
pub(super) fn product(has: Has<Avx512>, weight: StripsRef<'_, bf16>, x: &[bf16], tokens: usize) -> Sums<f32> {
    let x = interleave(x, tokens, weight.shape.cols);
    let size = Size { rows: weight.shape.rows, bytes: weight.bytes() };
    few::product(size, &x, tokens, |range, stride, out| {
        if tokens <= Pairs::TOKENS {
            has.run(Walk::<Pairs>::new(weight.cast(), range, &x, stride, out));
        } else {
            has.run(Many { weight: weight.cast(), range, x: &x, stride, out });
        }
    })
}

/// The activations of `[tokens, cols]` in the order of [`Pairs`]: for each pass, register by register of columns, a
/// register of each token. Completed with zero columns.
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

/// The kernel of strips. The activations of a pass are `[stride / 32][tokens][32]`: a register is read at a fixed
/// distance from one pointer, and no two compete for a set of L1.
#[derive(Debug)]
pub(super) struct Pairs;

// SAFETY: `sums` reads the strips' lines and, of each token, as many registers as the strips have blocks, which
// `stride` covers.
unsafe impl Format for Pairs {
    type Value = bf16;
    type Stored = bf16;
    type Activation = bf16;
    type Sum = f32;
    type Grouping = ();
    type Beside<'a> = ();
    const GROUPS: usize = bf16::GROUPS;
    const LINE_BYTES: usize = bf16::LINE_BYTES;
    const TOKENS: usize = 16;

    fn value(row: usize, group: usize, which: usize) -> usize {
        bf16::value(row, group, which)
    }

    fn code(row: usize, group: usize, which: usize) -> (usize, u32) {
        bf16::code(row, group, which)
    }

    fn get(line: &[bf16], value: usize) -> bf16 {
        bf16::get(line, value)
    }

    fn put(line: &mut [bf16], value: usize, kept: bf16) {
        bf16::put(line, value, kept);
    }

    fn borrow(_: &()) {}

    /// `V` is [`Avx512`].
    #[inline(always)]
    unsafe fn sums<V: Vector, const S: usize, const N: usize>(
        strips: [Strip<'_, Self>; S],
        x: *const bf16,
        _: usize,
        out: [[*mut f32; N]; S],
    ) {
        const { assert!(V::PAIRS.is_some()) };
        // SAFETY: the CPU has the instructions and the pointers are valid, as the trait requires.
        unsafe { sums::<false, S, N>(strips, std::ptr::null(), x, out) }
    }
}

/// For each row of line `i` of a block, the columns of its first and its second value among the block's 32.
///
/// # Safety
/// The CPU has AVX-512 (F, BW) and VBMI; `codes` are the line's words of positions; `i` is less than 8.
#[inline(always)]
pub(super) unsafe fn expanded(codes: *const u32, i: usize) -> __m512i {
    /// Four times the line, in both halves of a word.
    static GROUPS: [u32; 8] = [0, 0x4_0004, 0x8_0008, 0xC_000C, 0x10_0010, 0x14_0014, 0x18_0018, 0x1C_001C];
    /// `positions & 3 | group`.
    const AND_OR: i32 = 0xEA;
    // SAFETY: AVX-512 with VBMI is there, `codes` are two words, and `GROUPS` has an element `i`, as this function
    // requires.
    unsafe {
        // Of the eight bits that start there, the lower two are a position.
        let starts = _mm512_load_si512(STARTS.0.as_ptr().cast());
        let positions = _mm512_multishift_epi64_epi8(starts, _mm512_set1_epi64(codes.cast::<i64>().read_unaligned()));
        let group = _mm512_set1_epi32(*GROUPS.get_unchecked(i) as i32);
        _mm512_ternarylogic_epi64::<AND_OR>(positions, _mm512_set1_epi16(3), group)
    }
}

/// For each byte of a register of indices, where its bits start among the 64 of a line: row `r`'s first position at
/// `2r`, its second at `32 + 2r`.
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

/// Sums of `S` strips with the `N` tokens of a pass: `out[strip][token]` is valid for [`ROWS`] sums. Indices are those
/// of [`expanded`], computed or, where they are `STORED`, read: a register for each line from `stored` on.
///
/// # Safety
/// The CPU has AVX-512 (F, BW), VBMI and AVX512_BF16; the strips are of one weight; `x` has `N` registers for each of
/// their blocks. `stored` has been stored for the strips, where it is read.
#[expect(clippy::needless_range_loop, reason = "the index is of sums and of activations")]
#[inline(always)]
pub(super) unsafe fn sums<const STORED: bool, const S: usize, const N: usize>(
    strips: [Strip<'_, Pairs>; S],
    stored: *const u16,
    x: *const bf16,
    out: [[*mut f32; N]; S],
) {
    const { assert!(Pairs::BLOCK_LINES * 4 == LANES) };
    // SAFETY: `block + CACHE_LINE + i * LINE_BYTES` is the start of the strip's line `first + i`, which exists; a block
    // has a register of each of the `N` tokens; `out` has ROWS sums. Prefetching may point anywhere.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); N]; S];
        let start = strips.map(|strip| strip.as_ptr());
        let mut x = x;
        for Block { start: block, first, count } in blocks::<Pairs>(strips[0].lines()) {
            for strip in start {
                Avx512::prefetch(strip.wrapping_add(block + AHEAD));
            }
            for i in 0..count {
                let x = if S * N > 8 { hidden(x) } else { x };
                for s in 0..S {
                    let codes = start[s].add(block).cast::<u32>().add(i * Pairs::CODE_WORDS);
                    let values = start[s].add(block + CACHE_LINE + i * Pairs::LINE_BYTES);
                    Avx512::prefetch(values.wrapping_add(AHEAD));
                    let indices = if STORED {
                        _mm512_load_si512(stored.add((first + i) * LANES).cast())
                    } else {
                        expanded(codes, i)
                    };
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

/// The same pointer, of which the compiler does not know that it is the same: it would keep all tokens' columns in
/// registers from one line to the next, and spill sums.
#[expect(clippy::pointers_in_nomem_asm_block, reason = "the comment reads nothing through the pointer")]
#[inline(always)]
fn hidden<T>(mut pointer: *const T) -> *const T {
    // SAFETY: no instruction, only a comment.
    unsafe { asm!("/* {0} */", inout(reg) pointer, options(nomem, nostack, preserves_flags)) };
    pointer
}
