//! Making floats of four-bit integers.
//!
//! With intrinsics, since LLVM widens many lines side by side and scatters the results.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256, __m256i, __m512, __m512i, _mm_loadl_epi64, _mm_loadu_si128, _mm256_add_epi32, _mm256_and_si256,
    _mm256_castps_si256, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32, _mm256_loadu_ps, _mm256_mul_ps, _mm256_or_si256,
    _mm256_set1_epi32, _mm256_slli_epi32, _mm256_srli_epi32, _mm256_storeu_ps, _mm256_storeu_si256, _mm256_sub_epi32,
    _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_loadu_ps,
    _mm512_mul_ps, _mm512_or_si512, _mm512_set1_epi32, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_ps,
    _mm512_storeu_si512, _mm512_sub_epi32,
};

use half::bf16;

use super::{
    super::{aligned::CACHE_LINE, element::KernelElement, engine::Cpu, strips::ROWS},
    OFFSET,
};

/// The integers of a line: a byte for each row.
type Integers = [u8; ROWS];

/// A float that four-bit weights become.
pub(super) trait Wide: KernelElement {
    /// Makes floats of a line: integers times the scales of their rows, in the order of a strip.
    fn any(line: &Integers, scales: &[f32; ROWS], to: &mut [Self; 2 * ROWS]);

    /// The same with AVX2.
    ///
    /// # Safety
    /// The CPU has AVX2.
    #[cfg(target_arch = "x86_64")]
    unsafe fn avx2(line: &Integers, scales: &[f32; ROWS], to: &mut [Self; 2 * ROWS]);

    /// The same with AVX-512.
    ///
    /// # Safety
    /// The CPU has AVX-512 F.
    #[cfg(target_arch = "x86_64")]
    unsafe fn avx512(line: &Integers, scales: &[f32; ROWS], to: &mut [Self; 2 * ROWS]);
}

/// Makes floats of a block: copies its positions, and multiplies integers with the scales of their rows.
pub(super) fn widen<W: Wide>(cpu: Cpu, block: &[u8], scales: &[f32; ROWS], to: &mut [u8]) {
    let (codes, integers) = block.split_at(CACHE_LINE);
    let (to_codes, floats) = to.split_at_mut(CACHE_LINE);
    to_codes.copy_from_slice(codes);
    let lines = integers.as_chunks::<ROWS>().0;
    let floats = bytemuck::cast_slice_mut::<u8, W>(floats).as_chunks_mut::<{ 2 * ROWS }>().0;
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn avx2<W: Wide>(lines: &[Integers], scales: &[f32; ROWS], floats: &mut [[W; 2 * ROWS]]) {
        for (line, to) in lines.iter().zip(floats) {
            // SAFETY: the CPU has AVX2, as this function requires.
            unsafe { W::avx2(line, scales, to) };
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn avx512<W: Wide>(lines: &[Integers], scales: &[f32; ROWS], floats: &mut [[W; 2 * ROWS]]) {
        for (line, to) in lines.iter().zip(floats) {
            // SAFETY: the CPU has AVX-512, as this function requires.
            unsafe { W::avx512(line, scales, to) };
        }
    }
    match cpu {
        // SAFETY: a `HasAvx2` exists only where detection found the instructions.
        #[cfg(target_arch = "x86_64")]
        Cpu::Avx2(_) => unsafe { avx2(lines, scales, floats) },
        // SAFETY: a `HasAvx512` or a `HasAmx`, which implies it, exists only where detection found the instructions.
        #[cfg(target_arch = "x86_64")]
        Cpu::Avx512(_) | Cpu::Amx(_) => unsafe { avx512(lines, scales, floats) },
        Cpu::Scalar => lines.iter().zip(floats).for_each(|(line, to)| W::any(line, scales, to)),
    }
}

/// The integer in the lower half of a byte, or in the upper one.
fn integer(pair: u8, which: usize) -> f32 {
    (i32::from(pair >> (4 * which) & 15) - OFFSET) as f32
}

/// The sixteen first and the sixteen second values of a line.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn values_512(line: &Integers, scales: &[f32; ROWS]) -> [__m512; 2] {
    // SAFETY: both arrays are as long as a register.
    let (pairs, scales) =
        unsafe { (_mm512_cvtepu8_epi32(_mm_loadu_si128(line.as_ptr().cast())), _mm512_loadu_ps(scales.as_ptr())) };
    let value = |q: __m512i| _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(q, _mm512_set1_epi32(OFFSET))), scales);
    [value(_mm512_and_si512(pairs, _mm512_set1_epi32(15))), value(_mm512_srli_epi32::<4>(pairs))]
}

/// The eight first and the eight second values of half a line.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn values_256(line: &Integers, scales: &[f32; ROWS], half: usize) -> [__m256; 2] {
    let (line, scales) = (&line.as_chunks::<8>().0[half], &scales.as_chunks::<8>().0[half]);
    // SAFETY: eight bytes are loaded, and a register of scales.
    let (pairs, scales) =
        unsafe { (_mm256_cvtepu8_epi32(_mm_loadl_epi64(line.as_ptr().cast())), _mm256_loadu_ps(scales.as_ptr())) };
    let value = |q: __m256i| _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(q, _mm256_set1_epi32(OFFSET))), scales);
    [value(_mm256_and_si256(pairs, _mm256_set1_epi32(15))), value(_mm256_srli_epi32::<4>(pairs))]
}

impl Wide for f32 {
    fn any(line: &Integers, scales: &[f32; ROWS], to: &mut [f32; 2 * ROWS]) {
        for (i, to) in to.iter_mut().enumerate() {
            *to = integer(line[i % ROWS], i / ROWS) * scales[i % ROWS];
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn avx2(line: &Integers, scales: &[f32; ROWS], to: &mut [f32; 2 * ROWS]) {
        for half in 0..2 {
            for (which, values) in values_256(line, scales, half).into_iter().enumerate() {
                let eight = &mut to.as_chunks_mut::<8>().0[2 * which + half];
                // SAFETY: the array is as long as a register.
                unsafe { _mm256_storeu_ps(eight.as_mut_ptr(), values) };
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512(line: &Integers, scales: &[f32; ROWS], to: &mut [f32; 2 * ROWS]) {
        for (values, to) in values_512(line, scales).into_iter().zip(to.as_chunks_mut::<ROWS>().0) {
            // SAFETY: the array is as long as a register.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) };
        }
    }
}

impl Wide for bf16 {
    fn any(line: &Integers, scales: &[f32; ROWS], to: &mut [bf16; 2 * ROWS]) {
        for (i, to) in to.iter_mut().enumerate() {
            *to = bf16::from_f32(integer(line[i / 2], i % 2) * scales[i / 2]);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn avx2(line: &Integers, scales: &[f32; ROWS], to: &mut [bf16; 2 * ROWS]) {
        // Rounded to nearest, ties to even, in the upper half; the products are finite.
        let round = |values: __m256| {
            let bits = _mm256_castps_si256(values);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))))
        };
        for (half, to) in to.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
            let [first, second] = values_256(line, scales, half);
            let (first, second) = (round(first), round(second));
            // SAFETY: the array is as long as a register.
            unsafe {
                _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm256_or_si256(first, _mm256_slli_epi32::<16>(second)))
            };
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512(line: &Integers, scales: &[f32; ROWS], to: &mut [bf16; 2 * ROWS]) {
        let round = |values: __m512| {
            let bits = _mm512_castps_si512(values);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))))
        };
        let [first, second] = values_512(line, scales);
        let (first, second) = (round(first), round(second));
        // SAFETY: the array is as long as a register.
        unsafe {
            _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_or_si512(first, _mm512_slli_epi32::<16>(second)));
        }
    }
}
