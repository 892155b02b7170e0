//! Eight lanes: AVX2, FMA, F16C.
#![expect(unsafe_op_in_unsafe_fn, reason = "the contract is the trait's and the same for every method")]

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Has, Vector, Work};

/// AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernel) struct Avx2;

// SAFETY: every method uses AVX2, FMA and F16C only, for which `is_available` asks, and reads and writes a register
// where nothing else is said.
unsafe impl Vector for Avx2 {
    fn is_available() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn run<W: Work>(has: Has<Self>, work: W) -> W::Output {
        work.run(has)
    }

    const LANES: usize = 8;
    // Two strips with three tokens (measured on Zen 3).
    const TOKENS: usize = 3;
    const SUMS: usize = 6;
    // One strip where there are three: two spill (measured on a Zen 5).
    const BYTE_SUMS: usize = 4;
    const DENSE_TOKENS: [usize; 2] = [3, 2];

    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: x86-64 has SSE, and a prefetch never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    fn prefetch_second(p: *const u8) {
        // SAFETY: x86-64 has SSE, and a prefetch never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    type Floats = __m256;
    type FloatRows = [__m256; 2];
    type Four = __m256;
    type Positions = __m256i;

    instructions! {
        fn zero() -> __m256 = _mm256_setzero_ps();
        fn zero_rows() -> [__m256; 2] = [_mm256_setzero_ps(); 2];
        fn splat(value: f32) -> __m256 = _mm256_set1_ps(value);
        fn load(p: *const f32) -> __m256 = _mm256_loadu_ps(p);
        fn load_f16(p: *const f16) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(p.cast()));
        fn store(values: __m256, p: *mut f32) = _mm256_storeu_ps(p, values);
        fn four(p: *const f32) -> __m256 = _mm256_broadcast_ps(&*p.cast());
        fn pick(four: __m256, positions: __m256i) -> __m256 = _mm256_permutevar_ps(four, positions);
        fn multiply_add(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn multiply(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn transpose(columns: [*const f32; 4], rows: [*mut f32; 4]) = transposed(columns, rows);
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
    }

    #[inline(always)]
    unsafe fn load_pairs(p: *const bf16) -> [__m256; 2] {
        let pairs = _mm256_loadu_si256(p.cast());
        let second = _mm256_and_si256(pairs, _mm256_set1_epi32(0xFFFF_0000u32 as i32));
        [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(second)]
    }

    #[inline(always)]
    unsafe fn store_pairs([first, second]: [__m256; 2], p: *mut bf16) {
        let (first, second) = (rounded(first), rounded(second));
        _mm256_storeu_si256(p.cast(), _mm256_or_si256(first, _mm256_slli_epi32::<16>(second)));
    }

    #[inline(always)]
    unsafe fn positions(word: u32, part: usize) -> __m256i {
        // vpermilps reads the lowest two bits of each index, so nothing needs masking.
        let rows = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
        _mm256_srlv_epi32(_mm256_set1_epi32(word as i32), _mm256_add_epi32(rows, _mm256_set1_epi32(16 * part as i32)))
    }

    #[inline(always)]
    unsafe fn sum(values: __m256) -> f32 {
        let four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps::<1>(values));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }

    const OFFSET: i32 = 0;
    type Bytes = __m256i;
    type Sums = __m256i;
    type SumRows = [__m256i; 2];
    type Eight = __m256i;
    type Places = __m256i;
    /// A sixteenth of the scales.
    type Scales = __m256;

    instructions! {
        fn zero_sums() -> __m256i = _mm256_setzero_si256();
        fn zero_sum_rows() -> [__m256i; 2] = [_mm256_setzero_si256(); 2];
        fn load_bytes(p: *const i8) -> __m256i = _mm256_loadu_si256(p.cast());
        fn eight(p: *const i8) -> __m256i = _mm256_set1_epi64x(p.cast::<i64>().read_unaligned());
        fn pick_bytes(eight: __m256i, places: __m256i) -> __m256i = _mm256_shuffle_epi8(eight, places);
        fn store_sums(sums: __m256i, p: *mut i32) = _mm256_storeu_si256(p.cast(), sums);
        fn high_nibbles(bytes: __m256i) -> __m256i = _mm256_and_si256(bytes, _mm256_set1_epi8(-16));
    }

    #[inline(always)]
    unsafe fn places(codes: *const u32, part: usize) -> __m256i {
        // Quarter `2 * part` of all positions for the first 128 bits, the next for the others.
        let halves = _mm256_broadcastsi128_si256(_mm_loadu_si128(codes.cast()));
        let shifts = _mm256_add_epi64(_mm256_setr_epi64x(0, 0, 2, 2), _mm256_set1_epi64x(4 * part as i64));
        let positions = _mm256_and_si256(_mm256_srlv_epi64(halves, shifts), _mm256_set1_epi8(3));
        // Two bytes of every four are of the second group.
        _mm256_or_si256(positions, _mm256_set1_epi32(0x0404_0000))
    }

    #[inline(always)]
    unsafe fn dot(x: __m256i, w: __m256i, sums: __m256i) -> __m256i {
        // Activations are at least -127, so the sign can move from the weight to them, and two products of at most 128
        // * 127 do not saturate 16 bits.
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }

    #[inline(always)]
    unsafe fn total(sums: __m256i) -> i32 {
        let four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
        let two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
        _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two)))
    }

    #[inline(always)]
    unsafe fn low_nibbles(bytes: __m256i) -> __m256i {
        _mm256_and_si256(_mm256_slli_epi16::<4>(bytes), _mm256_set1_epi8(-16))
    }

    #[inline(always)]
    unsafe fn nibble(bytes: __m256i, bit: u32) -> __m256 {
        let top = _mm256_sllv_epi32(bytes, _mm256_set1_epi32(28 - bit as i32));
        _mm256_cvtepi32_ps(_mm256_srai_epi32::<28>(top))
    }

    #[inline(always)]
    unsafe fn float_positions(from: *const u32, to: *mut u32) {
        // Bytes `i` of a line's four words side by side, and then the transpose of four by four pairs of bits; see
        // `turned`.
        let bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        let (odd, upper) = (_mm256_set1_epi32(0x00CC_00CC), _mm256_set1_epi32(0x0000_F0F0));
        for half in 0..2 {
            let words = _mm256_shuffle_epi8(_mm256_loadu_si256(from.add(8 * half).cast()), bytes);
            let odd = _mm256_and_si256(_mm256_xor_si256(words, _mm256_srli_epi32::<6>(words)), odd);
            let words = _mm256_xor_si256(_mm256_xor_si256(words, odd), _mm256_slli_epi32::<6>(odd));
            let upper = _mm256_and_si256(_mm256_xor_si256(words, _mm256_srli_epi32::<12>(words)), upper);
            let words = _mm256_xor_si256(_mm256_xor_si256(words, upper), _mm256_slli_epi32::<12>(upper));
            _mm256_storeu_si256(to.add(8 * half).cast(), words);
        }
    }

    #[inline(always)]
    unsafe fn scales(header: *const u8, part: usize) -> __m256 {
        let scales = _mm256_cvtph_ps(_mm_loadu_si128(header.add(16 * part).cast()));
        _mm256_mul_ps(scales, _mm256_set1_ps(1.0 / 16.0))
    }

    #[inline(always)]
    unsafe fn add_scaled(sums: __m256i, scales: __m256, out: *mut f32) {
        // Sums of at most 256 products are exact in f32.
        _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scales, _mm256_loadu_ps(out)));
    }
}

/// The bits of the nearest bf16, ties to even, in the lower halves; the values are finite.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn rounded(values: __m256) -> __m256i {
    let bits = _mm256_castps_si256(values);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))))
}

/// See [`Vector::transpose`].
///
/// # Safety
/// As there; every x86-64 has the instructions.
#[inline(always)]
pub(super) unsafe fn transposed(columns: [*const f32; 4], rows: [*mut f32; 4]) {
    let (a, b, c, d) =
        (_mm_loadu_ps(columns[0]), _mm_loadu_ps(columns[1]), _mm_loadu_ps(columns[2]), _mm_loadu_ps(columns[3]));
    let (ab, cd) = (_mm_unpacklo_ps(a, b), _mm_unpacklo_ps(c, d));
    _mm_storeu_ps(rows[0], _mm_movelh_ps(ab, cd));
    _mm_storeu_ps(rows[1], _mm_movehl_ps(cd, ab));
    let (ab, cd) = (_mm_unpackhi_ps(a, b), _mm_unpackhi_ps(c, d));
    _mm_storeu_ps(rows[2], _mm_movelh_ps(ab, cd));
    _mm_storeu_ps(rows[3], _mm_movehl_ps(cd, ab));
}
