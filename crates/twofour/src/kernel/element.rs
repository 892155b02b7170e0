//! The float elements that kernels multiply with.

use half::{bf16, f16};

use super::strips::{Order, ROWS};
#[cfg(target_arch = "x86_64")]
use super::{
    amx::{self, TileElement},
    arguments::Sums,
    decode::DenseBlock,
    strips::Strips,
};
use crate::Arithmetic;

/// f32, bf16 or f16: what weights and activations of a float kernel are made of. Products accumulate in f32.
pub trait KernelElement: Arithmetic + Load + Order {}

impl KernelElement for f32 {}
impl KernelElement for bf16 {}
impl KernelElement for f16 {}

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Products of a 2:4 and of a dense weight with so many tokens.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub struct TileProducts<T> {
    pub(super) sparse: fn(&Strips<T>, &[T], usize) -> Sums<f32>,
    pub(super) dense: fn(DenseBlock<'_, T>, &[T], usize) -> Sums<f32>,
    /// Whether a value times zero may be other than zero: tiles multiply what was pruned.
    pub(super) is_special: fn(T) -> bool,
}

/// Seals [`KernelElement`] and widens elements to f32 vectors.
pub trait Load: Sized {
    /// Products by AMX tiles, for an element that they multiply.
    #[cfg(target_arch = "x86_64")]
    const TILES: Option<TileProducts<Self>> = None;

    /// Widens 8 elements.
    ///
    /// # Safety
    /// `p` is valid for reading 8 elements; the CPU has AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_avx2(p: *const Self) -> __m256;

    /// Widens 16 elements.
    ///
    /// # Safety
    /// `p` is valid for reading 16 elements; the CPU has AVX-512F.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_avx512(p: *const Self) -> __m512;

    /// Widens from a line of a strip the first and the second values of 8 rows, from row `8 * HALF` on.
    ///
    /// # Safety
    /// `line` is valid for reading a line; the CPU has AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn line_avx2<const HALF: usize>(line: *const Self) -> (__m256, __m256) {
        // SAFETY: first values come first, then the second ones; the rest is the caller's.
        unsafe { (Self::load_avx2(line.add(8 * HALF)), Self::load_avx2(line.add(ROWS + 8 * HALF))) }
    }

    /// Widens from a line of a strip the first and the second values of its rows.
    ///
    /// # Safety
    /// `line` is valid for reading a line; the CPU has AVX-512F.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn line_avx512(line: *const Self) -> (__m512, __m512) {
        // SAFETY: as above.
        unsafe { (Self::load_avx512(line), Self::load_avx512(line.add(ROWS))) }
    }
}

impl Load for f32 {
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(p: *const Self) -> __m256 {
        // SAFETY: the caller vouches for the pointer and the instructions.
        unsafe { _mm256_loadu_ps(p) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(p: *const Self) -> __m512 {
        // SAFETY: the caller vouches for the pointer and the instructions.
        unsafe { _mm512_loadu_ps(p) }
    }
}

impl Load for f16 {
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(p: *const Self) -> __m256 {
        // SAFETY: the caller vouches for the pointer and the instructions.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(p: *const Self) -> __m512 {
        // SAFETY: the caller vouches for the pointer and the instructions.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
}

impl Load for bf16 {
    #[cfg(target_arch = "x86_64")]
    const TILES: Option<TileProducts<Self>> =
        Some(TileProducts { sparse: amx::sparse, dense: amx::dense, is_special: <Self as TileElement>::is_special });

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx2(p: *const Self) -> __m256 {
        // SAFETY: the caller vouches for the pointer and the instructions.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn load_avx512(p: *const Self) -> __m512 {
        // SAFETY: the caller vouches for the pointer and the instructions.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }

    // A dword is a row's pair: the first value is its low half, the second its high half, which is where an f32 has
    // what a bf16 has.

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn line_avx2<const HALF: usize>(line: *const Self) -> (__m256, __m256) {
        // SAFETY: the caller vouches for the pointer and the instructions.
        unsafe {
            let pairs = _mm256_loadu_si256(line.add(16 * HALF).cast());
            let second = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000u32 as i32));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(second))
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    unsafe fn line_avx512(line: *const Self) -> (__m512, __m512) {
        // SAFETY: the caller vouches for the pointer and the instructions.
        unsafe {
            let pairs = _mm512_loadu_si512(line.cast());
            let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF_0000u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(second))
        }
    }
}
