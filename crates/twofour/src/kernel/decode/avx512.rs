//! Sixteen lanes: AVX-512.

use std::arch::x86_64::*;

use super::{
    super::element::{KernelElement, Load},
    dense_rows, sparse_rows,
    vector::Vector,
};

#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

// SAFETY: every method uses AVX-512F only, which the trait's contract demands of the CPU.
unsafe impl Vector for Avx512 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn widen<T: Load>(p: *const T) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { T::load_avx512(p) })
    }

    #[inline(always)]
    unsafe fn multiply_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the trait's contract.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }

    #[inline(always)]
    unsafe fn pick<const STEP: u32>(even: Self, odd: Self, word: u32) -> Self {
        // SAFETY: the trait's contract. vpermilps reads the lowest two bits of each index, so nothing needs masking.
        unsafe {
            let _ = STEP; // one step covers the whole word
            let shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let index = _mm512_srlv_epi32(_mm512_set1_epi32(word as i32), shifts);
            let e = _mm512_permutevar_ps(even.0, index);
            Avx512(_mm512_mask_permutevar_ps(e, 0b1100_1100_1100_1100, odd.0, index))
        }
    }
}

/// See [`sparse_rows`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ); the rest as [`sparse_rows`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn sparse<T: KernelElement>(block: super::SparseBlock<'_, T>, x: &[Vec<f32>], out: &mut [f32]) {
    // SAFETY: passed on to the caller.
    unsafe { sparse_rows::<Avx512, T>(block, x, out) }
}

/// See [`dense_rows`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ); the rest as [`dense_rows`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn dense<T: KernelElement>(block: super::DenseBlock<'_, T>, x: &[Vec<f32>], out: &mut [f32]) {
    // SAFETY: passed on to the caller.
    unsafe { dense_rows::<Avx512, T>(block, x, out) }
}
