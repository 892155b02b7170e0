//! AMX: tiles for bf16 and int8 (Intel from Sapphire Rapids on), with AVX-512.
//!
//! Stable Rust has no intrinsics for the tile instructions, so they are written as assembly.

use std::{
    arch::{asm, x86_64::*},
    ops::Range,
};

use half::bf16;

use super::{LINE, ROWS, Strip, Tile, permission};

/// Tiles, where the CPU has AVX-512, too.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernel) struct Amx;

impl Amx {
    /// Whether this machine has the tiles and AVX-512, and this process may use them.
    pub(in crate::kernel) fn is_available() -> bool {
        permission::granted() && is_x86_feature_detected!("avx512f")
    }
}

macro_rules! tile {
    ($type:ty, $sum:ty, $instruction:literal, $expand:ident) => {
        // SAFETY: the tiles are read and written as the trait says, by instructions for which `Amx::is_available` asks.
        unsafe impl Tile<$type> for Amx {
            unsafe fn configure(&self) {
                // SAFETY: the trait requires the instructions; the configuration is 64 bytes and valid. It also clears
                // the tiles.
                unsafe {
                    asm!(
                        "ldtilecfg [{}]",
                        in(reg) CONFIGURATION.0.as_ptr(),
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack, readonly),
                    )
                }
            }

            unsafe fn release(&self) {
                // SAFETY: the trait requires the instructions. All tiles are cleared.
                unsafe {
                    asm!(
                        "tilerelease",
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack, nomem),
                    )
                }
            }

            unsafe fn multiply(
                &self,
                left: [*const u8; 2],
                right: [*const u8; 2],
                depth: usize,
                sums: [[*mut $sum; 2]; 2],
            ) {
                if depth == 0 {
                    return;
                }
                // SAFETY: the CPU has AMX and `left`, `right` and `sums` are valid for what is read and written, as the
                // trait requires. All registers that change are named.
                unsafe {
                    asm!(
                        "tileloadd tmm0, [{c00} + {line}*1]",
                        "tileloadd tmm1, [{c01} + {line}*1]",
                        "tileloadd tmm2, [{c10} + {line}*1]",
                        "tileloadd tmm3, [{c11} + {line}*1]",
                        "2:",
                        "tileloadd tmm4, [{l0} + {line}*1]",
                        "tileloadd tmm6, [{r0} + {line}*1]",
                        concat!($instruction, " tmm0, tmm4, tmm6"),
                        "tileloadd tmm7, [{r1} + {line}*1]",
                        concat!($instruction, " tmm1, tmm4, tmm7"),
                        "tileloadd tmm5, [{l1} + {line}*1]",
                        concat!($instruction, " tmm2, tmm5, tmm6"),
                        concat!($instruction, " tmm3, tmm5, tmm7"),
                        "add {l0}, 1024",
                        "add {l1}, 1024",
                        "add {r0}, 1024",
                        "add {r1}, 1024",
                        "dec {depth}",
                        "jnz 2b",
                        "tilestored [{c00} + {line}*1], tmm0",
                        "tilestored [{c01} + {line}*1], tmm1",
                        "tilestored [{c10} + {line}*1], tmm2",
                        "tilestored [{c11} + {line}*1], tmm3",
                        c00 = in(reg) sums[0][0],
                        c01 = in(reg) sums[0][1],
                        c10 = in(reg) sums[1][0],
                        c11 = in(reg) sums[1][1],
                        l0 = inout(reg) left[0] => _,
                        l1 = inout(reg) left[1] => _,
                        r0 = inout(reg) right[0] => _,
                        r1 = inout(reg) right[1] => _,
                        depth = inout(reg) depth => _,
                        line = in(reg) LINE,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            }

            unsafe fn expand(&self, strip: Strip<'_, $type>, lines: Range<usize>, rows: &mut [u8]) {
                assert!(rows.len() == lines.len() * 2 * LINE);
                // SAFETY: the trait requires AVX-512; `rows` are two rows for each line.
                unsafe { $expand(strip, lines, rows) }
            }

            unsafe fn transpose(&self, words: &mut [u32; ROWS * ROWS]) {
                // SAFETY: the trait requires AVX-512.
                unsafe { transposed(words.as_mut_ptr()) }
            }
        }
    };
}

tile!(bf16, f32, "tdpbf16ps", expand_bf16);
tile!(i8, i32, "tdpbssd", expand_i8);

/// Palette 1, eight tiles of 16 rows of 64 bytes.
static CONFIGURATION: Configuration = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Configuration(bytes)
};

#[repr(align(64))]
struct Configuration([u8; 64]);

/// Expands lines of a strip: lane by lane, a row's values go where their positions say among the bits of a group.
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ); `rows` are two rows of a tile for each line.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn expand_bf16(strip: Strip<'_, bf16>, lines: Range<usize>, rows: &mut [u8]) {
    for (line, out) in lines.zip(rows.chunks_exact_mut(2 * LINE)) {
        let (values, codes) = strip.line(line);
        let (values, codes) = (values.as_ptr(), codes.as_ptr());
        // SAFETY: AVX-512 is there, as this function requires; the pointers are of a line, and `out` is two rows of a
        // tile.
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
            let upper = _mm512_or_si512(_mm512_sllv_epi32(first, a), _mm512_sllv_epi32(second, b));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), lower);
            _mm512_storeu_si512(out[LINE..].as_mut_ptr().cast(), upper);
        }
    }
}

/// The same for int8.
///
/// # Safety
/// As [`expand_bf16`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn expand_i8(strip: Strip<'_, i8>, lines: Range<usize>, rows: &mut [u8]) {
    for (line, out) in lines.zip(rows.chunks_exact_mut(2 * LINE)) {
        let (values, codes) = strip.line(line);
        let (values, codes) = (values.as_ptr(), codes.as_ptr());
        // SAFETY: AVX-512 is there, as this function requires; the pointers are of a line, and `out` is two rows of a
        // tile.
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
            _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_or_si512(first, second));
            _mm512_storeu_si512(out[LINE..].as_mut_ptr().cast(), _mm512_or_si512(third, fourth));
        }
    }
}

/// Transposes 4 by 4 words in each 128-bit block, then the 4 by 4 blocks.
///
/// # Safety
/// The CPU has AVX-512F; `words` is valid for 256.
#[target_feature(enable = "avx512f")]
unsafe fn transposed(words: *mut u32) {
    // SAFETY: AVX-512F is there and `words` is valid for 256 words, as this function requires; all offsets are below
    // that.
    unsafe {
        let row = |i: usize| _mm512_loadu_si512(words.add(16 * i).cast());
        let mut blocks = [[_mm512_setzero_si512(); 4]; 4];
        for (i, block) in blocks.iter_mut().enumerate() {
            let (a, b, c, d) = (row(4 * i), row(4 * i + 1), row(4 * i + 2), row(4 * i + 3));
            let (ab_low, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (cd_low, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            *block = [
                _mm512_unpacklo_epi64(ab_low, cd_low),
                _mm512_unpackhi_epi64(ab_low, cd_low),
                _mm512_unpacklo_epi64(ab_high, cd_high),
                _mm512_unpackhi_epi64(ab_high, cd_high),
            ];
        }
        // Block `j` of `blocks[i][k]` is column `4 * j + k` of rows `4 * i` to `4 * i + 3`.
        let [first, second, third, fourth] = blocks;
        for (k, (((a, b), c), d)) in first.into_iter().zip(second).zip(third).zip(fourth).enumerate() {
            let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xDD>(a, b));
            let (cd_even, cd_odd) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xDD>(c, d));
            let store = |j: usize, v| _mm512_storeu_si512(words.add(16 * (4 * j + k)).cast(), v);
            store(0, _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even));
            store(2, _mm512_shuffle_i32x4::<0xDD>(ab_even, cd_even));
            store(1, _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd));
            store(3, _mm512_shuffle_i32x4::<0xDD>(ab_odd, cd_odd));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        Compressed, MatrixRef,
        kernel::{
            format::Weight,
            strips::Strips,
            tile::{Element, TILE, tests::Plain},
        },
    };

    /// Tiles are filled as in plain Rust, also those of a strip that completes a pair.
    fn check<E: Element>(rows: usize, cols: usize, values: &[E], first: usize, tiles: usize)
    where
        Amx: Tile<E>,
        Plain: Tile<E>,
    {
        let compressed = Compressed::from_pruned(MatrixRef::new(rows, cols, values).unwrap()).unwrap();
        let strips = Strips::<E>::pack(&compressed, ()).unwrap();
        let weight = Weight::Sparse(strips.view());
        for strip in 0..=rows.div_ceil(ROWS) {
            let (mut found, mut expected) = (vec![0xAA; tiles * TILE], vec![0xAA; tiles * TILE]);
            // SAFETY: filling takes AVX-512 only, which was detected.
            unsafe { weight.fill(&Amx, strip, first, &mut found) };
            // SAFETY: plain Rust is always available.
            unsafe { weight.fill(&Plain, strip, first, &mut expected) };
            assert_eq!(found, expected, "strip {strip}");
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
            if !(is_x86_feature_detected!("avx512dq") && is_x86_feature_detected!("avx512bw")) {
                eprintln!("skipped: this machine has no AVX-512");
                return Ok(());
            }
            check(rows, cols, &bytes, first, tiles);
            let floats: Vec<bf16> = bytes.iter().map(|b| bf16::from_f32(f32::from(*b))).collect();
            check(rows, cols, &floats, first, tiles);
        }
    }

    #[test]
    fn rows_become_columns() {
        if !is_x86_feature_detected!("avx512f") {
            eprintln!("skipped: this CPU has no AVX-512");
            return;
        }
        let mut words: [u32; 256] = std::array::from_fn(|i| i as u32);
        // SAFETY: transposing takes AVX-512 only, which was detected.
        unsafe { Tile::<i8>::transpose(&Amx, &mut words) };
        for (i, word) in words.into_iter().enumerate() {
            assert_eq!(word as usize, i % 16 * 16 + i / 16);
        }
    }
}
