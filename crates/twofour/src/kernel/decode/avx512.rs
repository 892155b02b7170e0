//! Sixteen lanes: AVX-512.

use std::arch::x86_64::*;

use super::{
    super::element::{KernelElement, Load},
    dense_rows,
    int8::{self, ByteVector},
    sparse_rows,
    vector::Vector,
};

#[derive(Clone, Copy)]
pub(in crate::kernel) struct Avx512(__m512);

// SAFETY: every method uses AVX-512F only, which the trait's contract demands of the CPU.
unsafe impl Vector for Avx512 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait's contract.
        Avx512(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the trait's contract.
        unsafe { _mm512_storeu_ps(p, self.0) }
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

#[derive(Clone, Copy)]
pub(super) struct Bytes(__m512i);

// SAFETY: every method uses AVX-512 with VNNI only, which the trait's contract demands of the CPU.
unsafe impl ByteVector for Bytes {
    const WORDS: usize = 4;
    const OFFSET: i32 = 128;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait's contract.
        Bytes(unsafe { _mm512_setzero_si512() })
    }

    #[inline(always)]
    unsafe fn load(p: *const i8) -> Self {
        // SAFETY: the trait's contract.
        Bytes(unsafe { _mm512_loadu_si512(p.cast()) })
    }

    #[inline(always)]
    unsafe fn indices(words: *const u32) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            // A byte of metadata to each dword, then its four pairs of bits to the bytes of the dword.
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(words.cast()));
            let halves = _mm512_or_si512(bytes, _mm512_slli_epi32::<12>(bytes));
            let quarters = _mm512_or_si512(halves, _mm512_slli_epi32::<6>(halves));
            let groups = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12));
            Bytes(_mm512_or_si512(_mm512_and_si512(quarters, _mm512_set1_epi8(3)), groups))
        }
    }

    #[inline(always)]
    unsafe fn pick(lower: Self, upper: Self, indices: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let l = _mm512_shuffle_epi8(lower.0, indices.0);
            let u = _mm512_shuffle_epi8(upper.0, indices.0);
            Bytes(_mm512_mask_blend_epi32(0b1100_1100_1100_1100, l, u))
        }
    }

    #[inline(always)]
    unsafe fn dot(self, w: Self, sums: Self) -> Self {
        // SAFETY: the trait's contract. Activations are unsigned here: 128 has been added to them.
        Bytes(unsafe { _mm512_dpbusd_epi32(sums.0, self.0, w.0) })
    }

    #[inline(always)]
    unsafe fn sum(self) -> i32 {
        // SAFETY: the trait's contract.
        unsafe { _mm512_reduce_add_epi32(self.0) }
    }
}

/// See [`int8::sparse_rows`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ, VNNI); the rest as [`int8::sparse_rows`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn sparse_bytes(block: super::SparseBlock<'_, i8>, x: &[Vec<i8>], out: &mut [i32]) {
    // SAFETY: passed on to the caller.
    unsafe { int8::sparse_rows::<Bytes>(block, x, out) }
}

/// See [`int8::dense_rows`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ, VNNI); the rest as [`int8::dense_rows`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn dense_bytes(block: super::DenseBlock<'_, i8>, x: &[Vec<i8>], out: &mut [i32]) {
    // SAFETY: passed on to the caller.
    unsafe { int8::dense_rows::<Bytes>(block, x, out) }
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
