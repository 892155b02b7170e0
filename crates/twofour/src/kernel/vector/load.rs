//! Elements widened to f32 registers.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::super::strips::ROWS;

/// Widens elements to f32 vectors.
pub trait Load: Sized {
    /// Widens 8 elements.
    ///
    /// # Safety
    /// `p` is valid for reading 8 elements; the CPU has AVX2 and F16C.
    unsafe fn load_avx2(p: *const Self) -> __m256;

    /// Widens 16 elements.
    ///
    /// # Safety
    /// `p` is valid for reading 16 elements; the CPU has AVX-512F.
    unsafe fn load_avx512(p: *const Self) -> __m512;

    /// Widens from a line of a strip the first and the second values of 8 rows, from row `8 * HALF` on.
    ///
    /// # Safety
    /// `line` is valid for reading a line; the CPU has AVX2 and F16C.
    #[inline(always)]
    unsafe fn line_avx2<const HALF: usize>(line: *const Self) -> (__m256, __m256) {
        // SAFETY: the trait requires AVX2 and F16C, and a line: `ROWS` first values, then as many second ones.
        unsafe { (Self::load_avx2(line.add(8 * HALF)), Self::load_avx2(line.add(ROWS + 8 * HALF))) }
    }

    /// Widens from a line of a strip the first and the second values of its rows.
    ///
    /// # Safety
    /// `line` is valid for reading a line; the CPU has AVX-512F.
    #[inline(always)]
    unsafe fn line_avx512(line: *const Self) -> (__m512, __m512) {
        // SAFETY: the trait requires AVX-512F, and a line: `ROWS` first values, then as many second ones.
        unsafe { (Self::load_avx512(line), Self::load_avx512(line.add(ROWS))) }
    }
}

impl Load for f32 {
    #[inline(always)]
    unsafe fn load_avx2(p: *const Self) -> __m256 {
        // SAFETY: the trait requires the instructions of the CPU, and a pointer that is valid for what is read.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[inline(always)]
    unsafe fn load_avx512(p: *const Self) -> __m512 {
        // SAFETY: the trait requires the instructions of the CPU, and a pointer that is valid for what is read.
        unsafe { _mm512_loadu_ps(p) }
    }
}

impl Load for f16 {
    #[inline(always)]
    unsafe fn load_avx2(p: *const Self) -> __m256 {
        // SAFETY: the trait requires the instructions of the CPU, and a pointer that is valid for what is read.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_avx512(p: *const Self) -> __m512 {
        // SAFETY: the trait requires the instructions of the CPU, and a pointer that is valid for what is read.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
}

impl Load for bf16 {
    #[inline(always)]
    unsafe fn load_avx2(p: *const Self) -> __m256 {
        // SAFETY: the trait requires the instructions of the CPU, and a pointer that is valid for what is read.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }

    #[inline(always)]
    unsafe fn load_avx512(p: *const Self) -> __m512 {
        // SAFETY: the trait requires the instructions of the CPU, and a pointer that is valid for what is read.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }

    // A dword is a row's pair: the first value is its low half, the second its high half, which is where an f32 has
    // what a bf16 has.

    #[inline(always)]
    unsafe fn line_avx2<const HALF: usize>(line: *const Self) -> (__m256, __m256) {
        // SAFETY: the trait requires the instructions of the CPU, and a pointer that is valid for what is read.
        unsafe {
            let pairs = _mm256_loadu_si256(line.add(16 * HALF).cast());
            let second = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000u32 as i32));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(second))
        }
    }

    #[inline(always)]
    unsafe fn line_avx512(line: *const Self) -> (__m512, __m512) {
        // SAFETY: the trait requires the instructions of the CPU, and a pointer that is valid for what is read.
        unsafe {
            let pairs = _mm512_loadu_si512(line.cast());
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF_0000u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(second))
        }
    }
}
