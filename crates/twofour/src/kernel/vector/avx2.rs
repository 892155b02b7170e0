//! Eight lanes: AVX2, FMA, F16C.

use std::arch::x86_64::*;

use super::{ByteVector, Load, Vector};

#[derive(Clone, Copy)]
pub(in crate::kernel) struct Avx2(__m256);

// SAFETY: every method uses AVX2, FMA and F16C only, which the trait's contract demands of the CPU.
unsafe impl Vector for Avx2 {
    const LANES: usize = 8;
    type Positions = __m256i;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Avx2(unsafe { _mm256_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Avx2(unsafe { _mm256_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn splat_four(p: *const f32) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Avx2(unsafe { _mm256_broadcast_ps(&*p.cast()) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        unsafe { _mm256_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Avx2(unsafe { _mm256_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn widen<T: Load>(p: *const T) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Avx2(unsafe { T::load_avx2(p) })
    }

    #[inline(always)]
    unsafe fn line<T: Load, const HALF: usize>(line: *const T) -> (Self, Self) {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        let (first, second) = unsafe { T::line_avx2::<HALF>(line) };
        (Avx2(first), Avx2(second))
    }

    #[inline(always)]
    unsafe fn positions<const HALF: usize>(word: u32) -> Self::Positions {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written. vpermilps reads the lowest two bits of each index, so nothing needs masking.
        unsafe {
            let shifts = _mm256_add_epi32(
                _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14),
                _mm256_set1_epi32(2 * (HALF * Self::LANES) as i32),
            );
            _mm256_srlv_epi32(_mm256_set1_epi32(word as i32), shifts)
        }
    }

    #[inline(always)]
    unsafe fn pick(self, positions: Self::Positions) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Avx2(unsafe { _mm256_permutevar_ps(self.0, positions) })
    }

    #[inline(always)]
    unsafe fn multiply_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Avx2(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
}

#[derive(Clone, Copy)]
pub(in crate::kernel) struct Bytes(__m256i);

// SAFETY: every method uses AVX2 only, which the trait's contract demands of the CPU.
unsafe impl ByteVector for Bytes {
    const BYTES: usize = 32;
    const OFFSET: i32 = 0;
    const AHEAD: usize = 1600;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Bytes(unsafe { _mm256_setzero_si256() })
    }

    #[inline(always)]
    unsafe fn load(p: *const i8) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Bytes(unsafe { _mm256_loadu_si256(p.cast()) })
    }

    #[inline(always)]
    unsafe fn splat_eight(p: *const i8) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Bytes(unsafe { _mm256_set1_epi64x(p.cast::<i64>().read_unaligned()) })
    }

    #[inline(always)]
    unsafe fn places<const HALF: usize>(codes: *const u32) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        unsafe {
            // Quarter `2 * HALF` of all positions for the first 128 bits, the next for the others.
            let halves = _mm256_broadcastsi128_si256(_mm_loadu_si128(codes.cast()));
            let shifts = _mm256_add_epi64(_mm256_setr_epi64x(0, 0, 2, 2), _mm256_set1_epi64x(4 * HALF as i64));
            let positions = _mm256_and_si256(_mm256_srlv_epi64(halves, shifts), _mm256_set1_epi8(3));
            // Two bytes of every four are of the second group.
            Bytes(_mm256_or_si256(positions, _mm256_set1_epi32(0x0404_0000)))
        }
    }

    #[inline(always)]
    unsafe fn pick(self, places: Self) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        Bytes(unsafe { _mm256_shuffle_epi8(self.0, places.0) })
    }

    #[inline(always)]
    unsafe fn dot(self, w: Self, sums: Self) -> Self {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written. Activations are at least -127, so the sign can move from the weight to them, and two
        // products of at most 128 * 127 do not saturate 16 bits.
        unsafe {
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.0), _mm256_sign_epi8(self.0, w.0));
            Bytes(_mm256_add_epi32(sums.0, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))))
        }
    }

    #[inline(always)]
    unsafe fn low_nibbles(self) -> Self {
        // SAFETY: the trait requires AVX2 of the CPU.
        Bytes(unsafe { _mm256_and_si256(_mm256_slli_epi16::<4>(self.0), _mm256_set1_epi8(-16)) })
    }

    #[inline(always)]
    unsafe fn high_nibbles(self) -> Self {
        // SAFETY: the trait requires AVX2 of the CPU.
        Bytes(unsafe { _mm256_and_si256(self.0, _mm256_set1_epi8(-16)) })
    }

    /// A sixteenth of the scales.
    type Scales = __m256;

    #[inline(always)]
    unsafe fn scales<const HALF: usize>(header: *const u8) -> __m256 {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        unsafe {
            let scales = _mm256_cvtph_ps(_mm_loadu_si128(header.add(16 * HALF).cast()));
            _mm256_mul_ps(scales, _mm256_set1_ps(1.0 / 16.0))
        }
    }

    #[inline(always)]
    unsafe fn add_scaled(self, scales: __m256, out: *mut f32) {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written. Sums of at most 256 products are exact in f32.
        unsafe {
            _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(self.0), scales, _mm256_loadu_ps(out)));
        }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut i32) {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        unsafe { _mm256_storeu_si256(p.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> i32 {
        // SAFETY: the trait requires AVX2, FMA and F16C of the CPU, and pointers that are valid for what is read or written.
        unsafe {
            let four = _mm_add_epi32(_mm256_castsi256_si128(self.0), _mm256_extracti128_si256::<1>(self.0));
            let two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
        }
    }
}
