//! Sixteen lanes: AVX-512.
#![expect(unsafe_op_in_unsafe_fn, reason = "the contract is the trait's and the same for every method")]

mod pairs;

use std::{arch::x86_64::*, ops::Range};

use half::{bf16, f16};

use super::{Has, Vector, Work};
use crate::kernel::{
    KernelElement,
    format::PairProducts,
    many::{
        GROUP,
        kept_columns::{ColumnLists, StripRows},
    },
    strips::{ROWS, Strip},
};

/// AVX-512 with VNNI, VBMI and BF16.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernel) struct Avx512;

// SAFETY: every method uses AVX-512 with the extensions for which `is_available` asks, and reads and writes a register
// where nothing else is said.
unsafe impl Vector for Avx512 {
    fn is_available() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vbmi2")
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("popcnt")
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512vbmi2,avx512bf16,popcnt")]
    unsafe fn run<W: Work>(has: Has<Self>, work: W) -> W::Output {
        work.run(has)
    }

    const PAIRS: Option<PairProducts> = Some(pairs::PRODUCTS);
    const LANES: usize = 16;
    const TOKENS: usize = 16;
    const SUMS: usize = 16;
    const DENSE_TOKENS: [usize; 2] = [4, 4];
    const LISTS: [usize; 2] = [12, 48];
    const TILE_OUTS: usize = 8;
    const TILES: [usize; 2] = [3, 256];

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

    type Floats = __m512;
    type FloatRows = [__m512; 1];
    type Four = __m512;
    type Positions = __m512i;

    instructions! {
        fn zero() -> __m512 = _mm512_setzero_ps();
        fn zero_rows() -> [__m512; 1] = [_mm512_setzero_ps()];
        fn splat(value: f32) -> __m512 = _mm512_set1_ps(value);
        fn load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        fn load_f16(p: *const f16) -> __m512 = _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()));
        fn store(values: __m512, p: *mut f32) = _mm512_storeu_ps(p, values);
        fn four(p: *const f32) -> __m512 = _mm512_broadcast_f32x4(_mm_loadu_ps(p));
        fn pick(four: __m512, positions: __m512i) -> __m512 = _mm512_permutevar_ps(four, positions);
        fn multiply_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn multiply(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn sum(values: __m512) -> f32 = _mm512_reduce_add_ps(values);
        fn transpose(columns: [*const f32; 4], rows: [*mut f32; 4]) = super::avx2::transposed(columns, rows);
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))))
    }

    #[inline(always)]
    unsafe fn load_pairs(p: *const bf16) -> [__m512; 2] {
        let pairs = _mm512_loadu_si512(p.cast());
        let second = _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF_0000u32 as i32));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(second)]
    }

    #[inline(always)]
    unsafe fn store_pairs([first, second]: [__m512; 2], p: *mut bf16) {
        let (first, second) = (rounded(first), rounded(second));
        _mm512_storeu_si512(p.cast(), _mm512_or_si512(first, _mm512_slli_epi32::<16>(second)));
    }

    #[inline(always)]
    unsafe fn positions(word: u32, _: usize) -> __m512i {
        // vpermilps reads the lowest two bits of each index, so nothing needs masking.
        let rows = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        _mm512_srlv_epi32(_mm512_set1_epi32(word as i32), rows)
    }

    /// The rows that keep a column are a mask of sixteen bits, by which values and offsets are compressed.
    // A function of its own, whose references the compiler knows not to overlap.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,popcnt")]
    unsafe fn list_columns<T: KernelElement>(
        strip: Strip<'_, T>,
        groups: Range<usize>,
        rows: StripRows,
        lists: &mut ColumnLists,
    ) {
        let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let shifts = _mm512_add_epi32(lanes, lanes);
        let stride = _mm512_set1_epi32(rows.stride as i32);
        let offsets = _mm512_add_epi32(_mm512_set1_epi32(rows.offset as i32), _mm512_mullo_epi32(lanes, stride));
        let three = _mm512_set1_epi32(3);
        let inside = ((1u32 << rows.height) - 1) as __mmask16;
        for (group, first_out) in groups.zip((0..).step_by(GROUP)) {
            let (line, codes) = strip.line(group);
            assert!(line.len() == 2 * ROWS && codes.len() == 2);
            let [first, second] = T::load_line::<Self>(line.as_ptr(), 0);
            let mut positions = [three; 2];
            for which in 0..2 {
                positions[which] =
                    _mm512_and_epi32(_mm512_srlv_epi32(_mm512_set1_epi32(codes[which] as i32), shifts), three);
            }
            // Padding behind the last column multiplies nothing.
            for position in 0..GROUP.min(lists.outs() - first_out) {
                let column = _mm512_set1_epi32(position as i32);
                let of_first = _mm512_mask_cmpeq_epi32_mask(inside, positions[0], column);
                let of_second = _mm512_mask_cmpeq_epi32_mask(inside, positions[1], column);
                let kept = of_first | of_second;
                let column_values = _mm512_maskz_compress_ps(kept, _mm512_mask_mov_ps(first, of_second, second));
                let column_offsets = _mm512_maskz_compress_epi32(kept, offsets);
                let (values, offsets, length) = lists.rest(first_out + position);
                let (values, offsets) = (&mut values[..ROWS], &mut offsets[..ROWS]);
                _mm512_storeu_ps(values.as_mut_ptr(), column_values);
                _mm512_storeu_si512(offsets.as_mut_ptr().cast(), column_offsets);
                *length += kept.count_ones() as usize;
            }
        }
    }

    const OFFSET: i32 = 128;
    const AHEAD: usize = 1280;
    type Bytes = __m512i;
    type Sums = __m512i;
    type SumRows = [__m512i; 1];
    type Eight = __m512i;
    type Places = __m512i;
    /// A sixteenth of the scales, and what the sums have too much.
    type Scales = (__m512, __m512i);

    instructions! {
        fn zero_sums() -> __m512i = _mm512_setzero_si512();
        fn zero_sum_rows() -> [__m512i; 1] = [_mm512_setzero_si512()];
        fn load_bytes(p: *const i8) -> __m512i = _mm512_loadu_si512(p.cast());
        fn eight(p: *const i8) -> __m512i = _mm512_set1_epi64(p.cast::<i64>().read_unaligned());
        fn pick_bytes(eight: __m512i, places: __m512i) -> __m512i = _mm512_shuffle_epi8(eight, places);
        fn store_sums(sums: __m512i, p: *mut i32) = _mm512_storeu_si512(p.cast(), sums);
        fn total(sums: __m512i) -> i32 = _mm512_reduce_add_epi32(sums);
        fn high_nibbles(bytes: __m512i) -> __m512i = _mm512_and_si512(bytes, _mm512_set1_epi8(-16));
    }

    #[inline(always)]
    unsafe fn places(codes: *const u32, _: usize) -> __m512i {
        let halves = _mm512_broadcast_i32x4(_mm_loadu_si128(codes.cast()));
        let shifted = _mm512_srlv_epi64(halves, _mm512_setr_epi64(0, 0, 2, 2, 4, 4, 6, 6));
        // `shifted & 3 | group`: two bytes of every four are of the second group.
        const AND_OR: i32 = 0xEA;
        _mm512_ternarylogic_epi64::<AND_OR>(shifted, _mm512_set1_epi8(3), _mm512_set1_epi32(0x0404_0000))
    }

    #[inline(always)]
    unsafe fn dot(x: __m512i, w: __m512i, sums: __m512i) -> __m512i {
        // Activations are unsigned here: 128 has been added to them.
        _mm512_dpbusd_epi32(sums, x, w)
    }

    #[inline(always)]
    unsafe fn low_nibbles(bytes: __m512i) -> __m512i {
        _mm512_and_si512(_mm512_slli_epi16::<4>(bytes), _mm512_set1_epi8(-16))
    }

    #[inline(always)]
    unsafe fn nibble(bytes: __m512i, bit: u32) -> __m512 {
        let top = _mm512_sllv_epi32(bytes, _mm512_set1_epi32(28 - bit as i32));
        _mm512_cvtepi32_ps(_mm512_srai_epi32::<28>(top))
    }

    #[inline(always)]
    unsafe fn float_positions(from: *const u32, to: *mut u32) {
        // Bytes `i` of a line's four words side by side, and then the transpose of four by four pairs of bits; see
        // `turned`.
        let bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        let (odd, upper) = (_mm512_set1_epi32(0x00CC_00CC), _mm512_set1_epi32(0x0000_F0F0));
        let words = _mm512_shuffle_epi8(_mm512_loadu_si512(from.cast()), bytes);
        let odd = _mm512_and_si512(_mm512_xor_si512(words, _mm512_srli_epi32::<6>(words)), odd);
        let words = _mm512_xor_si512(_mm512_xor_si512(words, odd), _mm512_slli_epi32::<6>(odd));
        let upper = _mm512_and_si512(_mm512_xor_si512(words, _mm512_srli_epi32::<12>(words)), upper);
        let words = _mm512_xor_si512(_mm512_xor_si512(words, upper), _mm512_slli_epi32::<12>(upper));
        _mm512_storeu_si512(to.cast(), words);
    }

    #[inline(always)]
    unsafe fn scales(header: *const u8, _: usize) -> (__m512, __m512i) {
        let scales = _mm512_cvtph_ps(_mm256_loadu_si256(header.cast()));
        let sums = _mm512_cvtepi16_epi32(_mm256_loadu_si256(header.add(32).cast()));
        // 16 * 128 times the sum of the integers is too much.
        (_mm512_mul_ps(scales, _mm512_set1_ps(1.0 / 16.0)), _mm512_slli_epi32::<11>(sums))
    }

    #[inline(always)]
    unsafe fn add_scaled(sums: __m512i, (scales, excess): (__m512, __m512i), out: *mut f32) {
        // Sums of at most 256 products are exact in f32.
        let exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums, excess));
        _mm512_storeu_ps(out, _mm512_fmadd_ps(exact, scales, _mm512_loadu_ps(out)));
    }
}

/// The bits of the nearest bf16, ties to even, in the lower halves; the values are finite.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn rounded(values: __m512) -> __m512i {
    let bits = _mm512_castps_si512(values);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))))
}
