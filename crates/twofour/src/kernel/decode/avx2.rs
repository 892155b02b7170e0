//! Eight lanes: AVX2, FMA, F16C.

use std::arch::x86_64::*;

use super::{
    super::element::{KernelElement, Load},
    dense_rows, sparse_rows,
    vector::Vector,
};

#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256);

// SAFETY: every method uses AVX2, FMA and F16C only, which the trait's contract demands of the CPU.
unsafe impl Vector for Avx2 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn widen<T: Load>(p: *const T) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { T::load_avx2(p) })
    }

    #[inline(always)]
    unsafe fn multiply_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the trait's contract.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    unsafe fn pick<const STEP: u32>(even: Self, odd: Self, word: u32) -> Self {
        // SAFETY: the trait's contract. vpermilps reads the lowest two bits of each index, so nothing needs masking.
        unsafe {
            let word = _mm256_set1_epi32((word >> (16 * STEP)) as i32);
            let index = _mm256_srlv_epi32(word, _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
            let (e, o) = (_mm256_permutevar_ps(even.0, index), _mm256_permutevar_ps(odd.0, index));
            Avx2(_mm256_blend_ps::<0b1100_1100>(e, o))
        }
    }
}

/// See [`sparse_rows`].
///
/// # Safety
/// The CPU has AVX2, FMA and F16C; the rest as [`sparse_rows`] says.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn sparse<T: KernelElement>(block: super::SparseBlock<'_, T>, x: &[Vec<f32>], out: &mut [f32]) {
    // SAFETY: passed on to the caller.
    unsafe { sparse_rows::<Avx2, T>(block, x, out) }
}

/// See [`dense_rows`].
///
/// # Safety
/// The CPU has AVX2, FMA and F16C; the rest as [`dense_rows`] says.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dense<T: KernelElement>(block: super::DenseBlock<'_, T>, x: &[Vec<f32>], out: &mut [f32]) {
    // SAFETY: passed on to the caller.
    unsafe { dense_rows::<Avx2, T>(block, x, out) }
}
