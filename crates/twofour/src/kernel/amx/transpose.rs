//! Transposing a tile.

use std::arch::x86_64::*;

use super::{super::engine::HasAvx512, SUMS};

/// Transposes 16 by 16 words.
pub(super) fn transpose(_: HasAvx512, words: &mut [u32]) {
    assert!(words.len() == SUMS);
    // SAFETY: a `HasAvx512` exists only where detection found the instructions; there are 256 words.
    unsafe { transpose_registers(words.as_mut_ptr()) }
}

/// Transposes 4 by 4 words in each 128-bit block, then the 4 by 4 blocks.
///
/// # Safety
/// The CPU has AVX-512F; `words` is valid for 256.
#[target_feature(enable = "avx512f")]
unsafe fn transpose_registers(words: *mut u32) {
    // SAFETY: AVX-512F is there and `words` is valid for 256 words, as this function requires; all offsets are below that.
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
    use super::*;
    use crate::kernel::engine::{Cpu, Engine};

    #[test]
    fn rows_become_columns() {
        let Ok(Cpu::Avx512(has)) = Cpu::detect(Engine::Avx512) else {
            eprintln!("skipped: this CPU has no AVX-512");
            return;
        };
        let mut words: Vec<u32> = (0..256).collect();
        transpose(has, &mut words);
        for (i, word) in words.into_iter().enumerate() {
            assert_eq!(word as usize, i % 16 * 16 + i / 16);
        }
    }
}
