//! Sixteen lanes: AVX-512.

use std::arch::x86_64::*;

use super::{ByteVector, Load, Vector};

#[derive(Clone, Copy)]
pub(in crate::kernel) struct Avx512(__m512);

// SAFETY: every method uses AVX-512F only, which the trait's contract demands of the CPU.
unsafe impl Vector for Avx512 {
    const LANES: usize = 16;
    type Positions = __m512i;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Avx512(unsafe { _mm512_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Avx512(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn splat_four(p: *const f32) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Avx512(unsafe { _mm512_broadcast_f32x4(_mm_loadu_ps(p)) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        unsafe { _mm512_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Avx512(unsafe { _mm512_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn widen<T: Load>(p: *const T) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Avx512(unsafe { T::load_avx512(p) })
    }

    #[inline(always)]
    unsafe fn line<T: Load, const HALF: usize>(line: *const T) -> (Self, Self) {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        let (first, second) = unsafe { T::line_avx512(line) };
        (Avx512(first), Avx512(second))
    }

    #[inline(always)]
    unsafe fn positions<const HALF: usize>(word: u32) -> Self::Positions {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written. vpermilps reads the lowest two bits of each index, so nothing needs masking.
        unsafe {
            let shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            _mm512_srlv_epi32(_mm512_set1_epi32(word as i32), shifts)
        }
    }

    #[inline(always)]
    unsafe fn pick(self, positions: Self::Positions) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Avx512(unsafe { _mm512_permutevar_ps(self.0, positions) })
    }

    #[inline(always)]
    unsafe fn multiply_add(self, b: Self, c: Self) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Avx512(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
}

#[derive(Clone, Copy)]
pub(in crate::kernel) struct Bytes(__m512i);

// SAFETY: every method uses AVX-512 with VNNI only, which the trait's contract demands of the CPU.
unsafe impl ByteVector for Bytes {
    const BYTES: usize = 64;
    const OFFSET: i32 = 128;
    const AHEAD: usize = 1280;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Bytes(unsafe { _mm512_setzero_si512() })
    }

    #[inline(always)]
    unsafe fn load(p: *const i8) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Bytes(unsafe { _mm512_loadu_si512(p.cast()) })
    }

    #[inline(always)]
    unsafe fn splat_eight(p: *const i8) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Bytes(unsafe { _mm512_set1_epi64(p.cast::<i64>().read_unaligned()) })
    }

    #[inline(always)]
    unsafe fn places<const HALF: usize>(codes: *const u32) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        unsafe {
            let halves = _mm512_broadcast_i32x4(_mm_loadu_si128(codes.cast()));
            let shifted = _mm512_srlv_epi64(halves, _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6));
            // `shifted & 3 | group`: two bytes of every four are of the second group.
            const AND_OR: i32 = 0xEA;
            Bytes(_mm512_ternarylogic_epi64::<AND_OR>(shifted, _mm512_set1_epi8(3), _mm512_set1_epi32(0x0404_0000)))
        }
    }

    #[inline(always)]
    unsafe fn pick(self, places: Self) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        Bytes(unsafe { _mm512_shuffle_epi8(self.0, places.0) })
    }

    #[inline(always)]
    unsafe fn dot(self, w: Self, sums: Self) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written. Activations are unsigned here: 128 has been added to them.
        Bytes(unsafe { _mm512_dpbusd_epi32(sums.0, self.0, w.0) })
    }

    #[inline(always)]
    unsafe fn low_nibbles(self) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU.
        Bytes(unsafe { _mm512_and_si512(_mm512_slli_epi16::<4>(self.0), _mm512_set1_epi8(-16)) })
    }

    #[inline(always)]
    unsafe fn high_nibbles(self) -> Self {
        // SAFETY: the trait requires AVX-512 of the CPU.
        Bytes(unsafe { _mm512_and_si512(self.0, _mm512_set1_epi8(-16)) })
    }

    /// A sixteenth of the scales, and what the sums have too much.
    type Scales = (__m512, __m512i);

    #[inline(always)]
    unsafe fn scales<const HALF: usize>(header: *const u8) -> Self::Scales {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        unsafe {
            let scales = _mm512_cvtph_ps(_mm256_loadu_si256(header.cast()));
            let sums = _mm512_cvtepi16_epi32(_mm256_loadu_si256(header.add(32).cast()));
            // 16 * 128 times the sum of the integers is too much.
            (_mm512_mul_ps(scales, _mm512_set1_ps(1.0 / 16.0)), _mm512_slli_epi32::<11>(sums))
        }
    }

    #[inline(always)]
    unsafe fn add_scaled(self, (scales, excess): Self::Scales, out: *mut f32) {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written. Sums of at most 256 products are exact in f32.
        unsafe {
            let exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(self.0, excess));
            _mm512_storeu_ps(out, _mm512_fmadd_ps(exact, scales, _mm512_loadu_ps(out)));
        }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut i32) {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        unsafe { _mm512_storeu_si512(p.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn sum(self) -> i32 {
        // SAFETY: the trait requires AVX-512 of the CPU, and pointers that are valid for what is read or written.
        unsafe { _mm512_reduce_add_epi32(self.0) }
    }
}
