//! Four lanes: NEON. How many registers each loop uses follows from there being 32 of them, and has not been measured.
#![expect(unsafe_op_in_unsafe_fn, reason = "the contract is the trait's and the same for every method")]

use std::arch::{aarch64::*, asm, is_aarch64_feature_detected};

use half::{bf16, f16};

use super::{Has, Vector, Work};

/// NEON.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernel) struct Neon;

// SAFETY: every method uses NEON only, for which `is_available` asks, and reads and writes a register where nothing
// else is said.
unsafe impl Vector for Neon {
    fn is_available() -> bool {
        is_aarch64_feature_detected!("neon")
    }

    #[target_feature(enable = "neon")]
    unsafe fn run<W: Work>(has: Has<Self>, work: W) -> W::Output {
        work.run(has)
    }

    const LANES: usize = 4;
    const TOKENS: usize = 3;
    const SUMS: usize = 6;
    const DENSE_TOKENS: [usize; 2] = [4, 4];
    const TILE_OUTS: usize = 8;
    const TILES: [usize; 2] = [3, 256];

    #[inline(always)]
    fn prefetch(p: *const u8) {
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
    }

    #[inline(always)]
    fn prefetch_second(p: *const u8) {
        // SAFETY: a prefetch never faults, whatever the address.
        unsafe { asm!("prfm pldl2keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
    }

    type Floats = float32x4_t;
    type FloatRows = [float32x4_t; 4];
    type Four = uint8x16_t;
    type Positions = uint8x16_t;

    instructions! {
        fn zero() -> float32x4_t = vdupq_n_f32(0.0);
        fn zero_rows() -> [float32x4_t; 4] = [vdupq_n_f32(0.0); 4];
        fn splat(value: f32) -> float32x4_t = vdupq_n_f32(value);
        fn load(p: *const f32) -> float32x4_t = vld1q_f32(p);
        fn load_f16(p: *const f16) -> float32x4_t = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.cast())));
        fn load_bf16(p: *const bf16) -> float32x4_t = vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.cast())));
        fn store(values: float32x4_t, p: *mut f32) = vst1q_f32(p, values);
        fn four(p: *const f32) -> uint8x16_t = vreinterpretq_u8_f32(vld1q_f32(p));
        fn multiply_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t = vfmaq_f32(c, a, b);
        fn multiply(a: float32x4_t, b: float32x4_t) -> float32x4_t = vmulq_f32(a, b);
        fn sum(values: float32x4_t) -> f32 = vaddvq_f32(values);
    }

    #[inline(always)]
    unsafe fn load_pairs(p: *const bf16) -> [float32x4_t; 2] {
        let pairs = vreinterpretq_u32_u16(vld1q_u16(p.cast()));
        let second = vandq_u32(pairs, vdupq_n_u32(0xFFFF_0000));
        [vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs)), vreinterpretq_f32_u32(second)]
    }

    #[inline(always)]
    unsafe fn store_pairs([first, second]: [float32x4_t; 2], p: *mut bf16) {
        let pairs = vorrq_u32(rounded(first), vshlq_n_u32::<16>(rounded(second)));
        vst1q_u16(p.cast(), vreinterpretq_u16_u32(pairs));
    }

    #[inline(always)]
    unsafe fn positions(word: u32, part: usize) -> uint8x16_t {
        let rows = [0, -2, -4, -6].map(|row| row - 8 * part as i32);
        let positions = vandq_u32(vshlq_u32(vdupq_n_u32(word), vld1q_s32(rows.as_ptr())), vdupq_n_u32(3));
        // The bytes of the float at a position.
        let bytes = vmlaq_u32(vdupq_n_u32(0x0302_0100), positions, vdupq_n_u32(0x0404_0404));
        vreinterpretq_u8_u32(bytes)
    }

    #[inline(always)]
    unsafe fn pick(four: uint8x16_t, positions: uint8x16_t) -> float32x4_t {
        vreinterpretq_f32_u8(vqtbl1q_u8(four, positions))
    }

    #[inline(always)]
    unsafe fn transpose(columns: [*const f32; 4], rows: [*mut f32; 4]) {
        let (a, b) = (vld1q_f32(columns[0]), vld1q_f32(columns[1]));
        let (c, d) = (vld1q_f32(columns[2]), vld1q_f32(columns[3]));
        let (ab, cd) = (vzip1q_f32(a, b), vzip1q_f32(c, d));
        vst1q_f32(rows[0], vcombine_f32(vget_low_f32(ab), vget_low_f32(cd)));
        vst1q_f32(rows[1], vcombine_f32(vget_high_f32(ab), vget_high_f32(cd)));
        let (ab, cd) = (vzip2q_f32(a, b), vzip2q_f32(c, d));
        vst1q_f32(rows[2], vcombine_f32(vget_low_f32(ab), vget_low_f32(cd)));
        vst1q_f32(rows[3], vcombine_f32(vget_high_f32(ab), vget_high_f32(cd)));
    }

    const OFFSET: i32 = 0;
    type Bytes = int8x16_t;
    type Sums = int32x4_t;
    type SumRows = [int32x4_t; 4];
    type Eight = int8x16_t;
    type Places = uint8x16_t;
    /// A sixteenth of the scales.
    type Scales = float32x4_t;

    instructions! {
        fn zero_sums() -> int32x4_t = vdupq_n_s32(0);
        fn zero_sum_rows() -> [int32x4_t; 4] = [vdupq_n_s32(0); 4];
        fn load_bytes(p: *const i8) -> int8x16_t = vld1q_s8(p);
        fn pick_bytes(eight: int8x16_t, places: uint8x16_t) -> int8x16_t = vqtbl1q_s8(eight, places);
        fn store_sums(sums: int32x4_t, p: *mut i32) = vst1q_s32(p, sums);
        fn total(sums: int32x4_t) -> i32 = vaddvq_s32(sums);
        fn low_nibbles(bytes: int8x16_t) -> int8x16_t = vshlq_n_s8::<4>(bytes);
        fn high_nibbles(bytes: int8x16_t) -> int8x16_t = vandq_s8(bytes, vdupq_n_s8(-16));
    }

    #[inline(always)]
    unsafe fn eight(p: *const i8) -> int8x16_t {
        let eight = vld1_s8(p);
        vcombine_s8(eight, eight)
    }

    #[inline(always)]
    unsafe fn places(codes: *const u32, part: usize) -> uint8x16_t {
        // Each byte has a position of each part.
        let shifted = vshlq_u8(vld1q_u8(codes.cast()), vdupq_n_s8(-2 * part as i8));
        // Two bytes of every four are of the second group.
        vorrq_u8(vandq_u8(shifted, vdupq_n_u8(3)), vreinterpretq_u8_u32(vdupq_n_u32(0x0404_0000)))
    }

    #[inline(always)]
    unsafe fn dot(x: int8x16_t, w: int8x16_t, sums: int32x4_t) -> int32x4_t {
        let low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(w)));
        let high = vpaddlq_s16(vmull_high_s8(x, w));
        vaddq_s32(sums, vpaddq_s32(low, high))
    }

    #[inline(always)]
    unsafe fn nibble(bytes: int8x16_t, bit: u32) -> float32x4_t {
        let top = vshlq_s32(vreinterpretq_s32_s8(bytes), vdupq_n_s32(28 - bit as i32));
        vcvtq_f32_s32(vshrq_n_s32::<28>(top))
    }

    #[inline(always)]
    unsafe fn float_positions(from: *const u32, to: *mut u32) {
        // Bytes `i` of a line's four words side by side, and then the transpose of four by four pairs of bits; see
        // `turned`.
        let bytes = vld1q_u8([0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15].as_ptr());
        for line in 0..4 {
            let words = vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(from.add(4 * line).cast()), bytes));
            let odd = vandq_u32(veorq_u32(words, vshrq_n_u32::<6>(words)), vdupq_n_u32(0x00CC_00CC));
            let words = veorq_u32(veorq_u32(words, odd), vshlq_n_u32::<6>(odd));
            let upper = vandq_u32(veorq_u32(words, vshrq_n_u32::<12>(words)), vdupq_n_u32(0x0000_F0F0));
            let words = veorq_u32(veorq_u32(words, upper), vshlq_n_u32::<12>(upper));
            vst1q_u32(to.add(4 * line), words);
        }
    }

    #[inline(always)]
    unsafe fn scales(header: *const u8, part: usize) -> float32x4_t {
        vmulq_f32(Self::load_f16(header.cast::<f16>().add(4 * part)), vdupq_n_f32(1.0 / 16.0))
    }

    #[inline(always)]
    unsafe fn add_scaled(sums: int32x4_t, scales: float32x4_t, out: *mut f32) {
        // Sums of at most 256 products are exact in f32.
        vst1q_f32(out, vfmaq_f32(vld1q_f32(out), vcvtq_f32_s32(sums), scales));
    }
}

/// The bits of the nearest bf16, ties to even, in the lower halves; the values are finite.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn rounded(values: float32x4_t) -> uint32x4_t {
    let bits = vreinterpretq_u32_f32(values);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    vshrq_n_u32::<16>(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF))))
}
