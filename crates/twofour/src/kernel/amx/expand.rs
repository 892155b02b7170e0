//! 2:4 weights as right factors: a row of a tile holds four bytes of depth of sixteen outputs, which is how strips lie, so that a
//! line of a strip becomes two rows of a tile, lane by lane.

use std::{arch::x86_64::*, ops::Range};

use half::bf16;

use super::{
    super::{
        engine::HasAvx512,
        strips::{Order, ROWS, Strip, StripsRef},
    },
    Factor, LINE, SUMS, TILE, TileElement,
};

/// Lines of a strip that a tile is expanded from.
const LINES: usize = TILE / (2 * LINE);

/// An element whose strips can be expanded.
pub(in super::super) trait Expand: Order {
    /// Expands a line of a strip to two rows of a tile.
    ///
    /// # Safety
    /// The CPU has AVX-512; `values` and `codes` are a line of a strip.
    unsafe fn expand(values: *const Self, codes: *const u32) -> [__m512i; 2];
}

impl Expand for bf16 {
    #[inline(always)]
    unsafe fn expand(values: *const Self, codes: *const u32) -> [__m512i; 2] {
        // SAFETY: AVX-512 is there and both pointers are of a line, as the trait requires.
        unsafe {
            let pairs = _mm512_loadu_si512(values.cast());
            let first = _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF));
            let second = _mm512_srli_epi32::<16>(pairs);
            // Where a row's value goes, in bits of the 64 of a group: 0, 16, 32 or 48.
            let rows = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let place = |word: u32| {
                let position = _mm512_srlv_epi32(_mm512_set1_epi32(word as i32), rows);
                _mm512_slli_epi32::<4>(_mm512_and_si512(position, _mm512_set1_epi32(3)))
            };
            let (a, b) = (place(*codes), place(*codes.add(1)));
            // A shift by more than 31, or by less than 0, leaves nothing.
            let lower = _mm512_or_si512(_mm512_sllv_epi32(first, a), _mm512_sllv_epi32(second, b));
            let half = _mm512_set1_epi32(32);
            let (a, b) = (_mm512_sub_epi32(a, half), _mm512_sub_epi32(b, half));
            [lower, _mm512_or_si512(_mm512_sllv_epi32(first, a), _mm512_sllv_epi32(second, b))]
        }
    }
}

impl Expand for i8 {
    #[inline(always)]
    unsafe fn expand(values: *const Self, codes: *const u32) -> [__m512i; 2] {
        // SAFETY: AVX-512 is there and both pointers are of a line, as the trait requires.
        unsafe {
            let fours = _mm512_loadu_si512(values.cast());
            let halves = _mm512_broadcast_i32x4(_mm_loadu_si128(codes.cast()));
            // A position in the lowest two bits of each byte, whatever the others are.
            let positions = _mm512_srlv_epi64(halves, _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6));
            let byte = _mm512_set1_epi32(0xFF);
            // Eight times a position.
            let mask = _mm512_set1_epi32(0x18);
            let first = _mm512_sllv_epi32(
                _mm512_and_si512(fours, byte),
                _mm512_and_si512(_mm512_slli_epi32::<3>(positions), mask),
            );
            let second = _mm512_sllv_epi32(
                _mm512_and_si512(_mm512_srli_epi32::<8>(fours), byte),
                _mm512_and_si512(_mm512_srli_epi32::<5>(positions), mask),
            );
            let third = _mm512_sllv_epi32(
                _mm512_and_si512(_mm512_srli_epi32::<16>(fours), byte),
                _mm512_and_si512(_mm512_srli_epi32::<13>(positions), mask),
            );
            let fourth = _mm512_sllv_epi32(
                _mm512_srli_epi32::<24>(fours),
                _mm512_and_si512(_mm512_srli_epi32::<21>(positions), mask),
            );
            [_mm512_or_si512(first, second), _mm512_or_si512(third, fourth)]
        }
    }
}

/// Expands lines of a strip to tiles; what is past the last line is zero.
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn expand<E: Expand>(strip: Strip<'_, E>, lines: Range<usize>, tiles: &mut [u8]) {
    let (filled, rest) = tiles.split_at_mut(lines.len() * 2 * LINE);
    for (line, out) in lines.zip(filled.chunks_exact_mut(2 * LINE)) {
        let (values, codes) = strip.line(line);
        // SAFETY: AVX-512 is there, as this function requires; the slices are a line, and `out` is two rows of a tile.
        unsafe {
            let [lower, upper] = E::expand(values.as_ptr(), codes.as_ptr());
            _mm512_storeu_si512(out.as_mut_ptr().cast(), lower);
            _mm512_storeu_si512(out[LINE..].as_mut_ptr().cast(), upper);
        }
    }
    rest.fill(0);
}

impl<E: TileElement> Factor for StripsRef<'_, E> {
    type Element = E;

    fn rows(&self) -> usize {
        StripsRef::rows(self)
    }

    fn cols(&self) -> usize {
        StripsRef::cols(self)
    }

    /// Left factors: 16 rows of 64 bytes of a token each.
    fn pack_tokens(_: HasAvx512, x: &[E], cols: usize, tiles: &mut [u8]) {
        super::dense::pack_rows(x, cols, 0, tiles);
    }

    fn fill(&self, _: HasAvx512, strip: usize, first: usize, tiles: &mut [u8]) {
        if strip * ROWS >= StripsRef::rows(self) {
            // A strip that completes a pair.
            return tiles.fill(0);
        }
        let strip = self.strip(strip);
        let lines = first * LINES..(first * LINES + tiles.len() / (2 * LINE)).min(strip.lines());
        // SAFETY: a `HasAvx512` exists only where detection found the instructions.
        unsafe { expand(strip, lines, tiles) }
    }

    #[inline(always)]
    unsafe fn multiply(weights: [*const u8; 2], tokens: [*const u8; 2], depth: usize, sums: [*mut E::Sum; 2]) {
        // SAFETY: AMX is there, the tiles are configured and the pointers are valid, as the trait requires; `sums` are valid for two tiles.
        unsafe {
            let of_token = |token: usize| sums.map(|sums| sums.add(token * SUMS));
            E::multiply(tokens, weights, depth, [of_token(0), of_token(1)]);
        }
    }

    fn finish(_: HasAvx512, _: &mut [E::Sum]) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Compressed, MatrixRef,
        kernel::{
            engine::{Cpu, Engine},
            strips::Strips,
        },
    };
    use proptest::prelude::*;

    /// A row of a tile holds four bytes of depth of each row of the strip.
    fn check<E: TileElement>(has: HasAvx512, rows: usize, cols: usize, values: &[E], first: usize, tiles: usize) {
        let compressed = Compressed::from_pruned(MatrixRef::new(rows, cols, values).unwrap()).unwrap();
        let dense = compressed.to_dense();
        let strips = Strips::pack(&compressed).unwrap();
        let strips = &strips.view();
        let of_four_bytes = 4 / size_of::<E>();
        // One strip more than there are: what completes a pair.
        for strip in 0..=rows.div_ceil(ROWS) {
            let mut bytes = vec![0xAA; tiles * TILE];
            Factor::fill(strips, has, strip, first, &mut bytes);
            for (depth, line) in (first * TILE / LINE..).zip(bytes.chunks_exact(LINE)) {
                for (row, four) in (strip * ROWS..).zip(line.chunks_exact(4)) {
                    let at = |col: usize| if row < rows && col < cols { dense[row * cols + col] } else { E::ZERO };
                    let expected: Vec<E> = (depth * of_four_bytes..(depth + 1) * of_four_bytes).map(at).collect();
                    assert_eq!(four, bytemuck::cast_slice::<E, u8>(&expected), "row {row}, four bytes {depth}");
                }
            }
        }
    }

    proptest! {
        // Filling tiles takes AVX-512; only multiplying them takes AMX.
        #[test]
        fn tiles_hold_the_dense_weight(
            (rows, cols, bytes) in (1usize..40, 1usize..300).prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec(any::<i8>(), r * c))),
            first in 0usize..4,
            tiles in 1usize..4,
        ) {
            let Ok(Cpu::Avx512(has)) = Cpu::detect(Engine::Avx512) else {
                eprintln!("skipped: this machine has no AVX-512");
                return Ok(());
            };
            check(has, rows, cols, &bytes, first, tiles);
            let floats: Vec<bf16> = bytes.iter().map(|b| bf16::from_f32(f32::from(*b))).collect();
            check(has, rows, cols, &floats, first, tiles);
        }
    }
}
