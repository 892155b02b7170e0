//! Eight lanes: AVX2, FMA, F16C.

use std::arch::x86_64::*;

use super::{
    super::element::{KernelElement, Load},
    dense_rows,
    int8::{self, ByteVector},
    sparse_rows,
    vector::Vector,
};

#[derive(Clone, Copy)]
pub(in crate::kernel) struct Avx2(__m256);

// SAFETY: every method uses AVX2, FMA and F16C only, which the trait's contract demands of the CPU.
unsafe impl Vector for Avx2 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait's contract.
        Avx2(unsafe { _mm256_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the trait's contract.
        unsafe { _mm256_storeu_ps(p, self.0) }
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
            // Both steps shift the same broadcast word, so that it is loaded once.
            let shifts =
                _mm256_add_epi32(_mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14), _mm256_set1_epi32(16 * STEP as i32));
            let index = _mm256_srlv_epi32(_mm256_set1_epi32(word as i32), shifts);
            let (e, o) = (_mm256_permutevar_ps(even.0, index), _mm256_permutevar_ps(odd.0, index));
            Avx2(_mm256_blend_ps::<0b1100_1100>(e, o))
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Bytes(__m256i);

// SAFETY: every method uses AVX2 only, which the trait's contract demands of the CPU.
unsafe impl ByteVector for Bytes {
    const WORDS: usize = 2;
    const OFFSET: i32 = 0;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait's contract.
        Bytes(unsafe { _mm256_setzero_si256() })
    }

    #[inline(always)]
    unsafe fn load(p: *const i8) -> Self {
        // SAFETY: the trait's contract.
        Bytes(unsafe { _mm256_loadu_si256(p.cast()) })
    }

    #[inline(always)]
    unsafe fn indices(words: *const u32) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            // A byte of metadata to each dword, then its four pairs of bits to the bytes of the dword.
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(words.cast()));
            let halves = _mm256_or_si256(bytes, _mm256_slli_epi32::<12>(bytes));
            let quarters = _mm256_or_si256(halves, _mm256_slli_epi32::<6>(halves));
            let groups = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12));
            Bytes(_mm256_or_si256(_mm256_and_si256(quarters, _mm256_set1_epi8(3)), groups))
        }
    }

    #[inline(always)]
    unsafe fn pick(lower: Self, upper: Self, indices: Self) -> Self {
        // SAFETY: the trait's contract.
        unsafe {
            let (l, u) = (_mm256_shuffle_epi8(lower.0, indices.0), _mm256_shuffle_epi8(upper.0, indices.0));
            Bytes(_mm256_blend_epi32::<0b1100_1100>(l, u))
        }
    }

    #[inline(always)]
    unsafe fn dot(self, w: Self, sums: Self) -> Self {
        // SAFETY: the trait's contract. Activations are at least -127, so the sign can move from the weight to them, and two
        // products of at most 128 * 127 do not saturate 16 bits.
        unsafe {
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.0), _mm256_sign_epi8(self.0, w.0));
            Bytes(_mm256_add_epi32(sums.0, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))))
        }
    }

    #[inline(always)]
    unsafe fn sum(self) -> i32 {
        // SAFETY: the trait's contract.
        unsafe {
            let four = _mm_add_epi32(_mm256_castsi256_si128(self.0), _mm256_extracti128_si256::<1>(self.0));
            let two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
        }
    }
}

/// See [`int8::sparse_rows`].
///
/// # Safety
/// The CPU has AVX2; the rest as [`int8::sparse_rows`] says.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn sparse_bytes(block: super::SparseBlock<'_, i8>, x: &[Vec<i8>], out: &mut [i32]) {
    // SAFETY: passed on to the caller.
    unsafe { int8::sparse_rows::<Bytes>(block, x, out) }
}

/// See [`int8::dense_rows`].
///
/// # Safety
/// The CPU has AVX2; the rest as [`int8::dense_rows`] says.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn dense_bytes(block: super::DenseBlock<'_, i8>, x: &[Vec<i8>], out: &mut [i32]) {
    // SAFETY: passed on to the caller.
    unsafe { int8::dense_rows::<Bytes>(block, x, out) }
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
