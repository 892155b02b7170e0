//! The float elements that kernels multiply with.

use half::{bf16, f16};

use crate::Arithmetic;

/// f32, bf16 or f16: what weights and activations of a float kernel are made of. Products accumulate in f32.
pub trait KernelElement: Arithmetic + Load {}

impl KernelElement for f32 {}
impl KernelElement for bf16 {}
impl KernelElement for f16 {}

/// Seals [`KernelElement`] and widens elements to f32 vectors.
pub trait Load: Sized {
    /// Widens 8 elements.
    ///
    /// # Safety
    /// `p` is valid for reading 8 elements; the CPU has AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_avx2(p: *const Self) -> std::arch::x86_64::__m256;

    /// Widens 16 elements.
    ///
    /// # Safety
    /// `p` is valid for reading 16 elements; the CPU has AVX-512F.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_avx512(p: *const Self) -> std::arch::x86_64::__m512;
}

macro_rules! load {
    ($type:ty, $p:ident, $avx2:expr, $avx512:expr) => {
        impl Load for $type {
            #[cfg(target_arch = "x86_64")]
            #[inline(always)]
            unsafe fn load_avx2($p: *const Self) -> std::arch::x86_64::__m256 {
                use std::arch::x86_64::*;
                // SAFETY: the caller vouches for the pointer and the instructions.
                unsafe { $avx2 }
            }
            #[cfg(target_arch = "x86_64")]
            #[inline(always)]
            unsafe fn load_avx512($p: *const Self) -> std::arch::x86_64::__m512 {
                use std::arch::x86_64::*;
                // SAFETY: the caller vouches for the pointer and the instructions.
                unsafe { $avx512 }
            }
        }
    };
}

load!(f32, p, _mm256_loadu_ps(p), _mm512_loadu_ps(p));
load!(
    bf16,
    p,
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))),
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))))
);
load!(f16, p, _mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())));
