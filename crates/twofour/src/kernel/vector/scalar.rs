//! Portable Rust: one lane. Products and sums are rounded one after the other, in order of column.
#![expect(unsafe_op_in_unsafe_fn, reason = "the contract is the trait's and the same for every method")]

use half::{bf16, f16};

use super::{Has, Many, Vector, Work};
use crate::kernel::strips::ROWS;

/// No instructions of any CPU in particular.
#[derive(Debug, Clone, Copy)]
pub(in crate::kernel) struct Scalar;

// SAFETY: every method reads and writes as many elements as the trait says, and needs no instructions.
unsafe impl Vector for Scalar {
    fn is_available() -> bool {
        true
    }

    unsafe fn run<W: Work>(has: Has<Self>, work: W) -> W::Output {
        work.run(has)
    }

    /// The loops for many tokens add up in another order.
    const MANY: Many = Many { sparse: usize::MAX, dense: usize::MAX, gradient: usize::MAX, transposed: usize::MAX };
    const LANES: usize = 1;
    const TOKENS: usize = 4;
    const SUMS: usize = 4;
    const DENSE_TOKENS: [usize; 2] = [1, 1];

    type Floats = f32;
    type FloatRows = [f32; ROWS];
    type Four = [f32; 4];
    type Positions = usize;

    instructions! {
        fn zero_rows() -> [f32; ROWS] = [0.0; ROWS];
        fn splat(value: f32) -> f32 = value;
        fn load(p: *const f32) -> f32 = *p;
        fn load_f16(p: *const f16) -> f32 = (*p).to_f32();
        fn load_bf16(p: *const bf16) -> f32 = (*p).to_f32();
        fn load_pairs(p: *const bf16) -> [f32; 2] = [(*p).to_f32(), (*p.add(1)).to_f32()];
        fn store(value: f32, p: *mut f32) = *p = value;
        fn four(p: *const f32) -> [f32; 4] = p.cast::<[f32; 4]>().read();
        fn positions(word: u32, part: usize) -> usize = (word >> (2 * part) & 3) as usize;
        fn pick(four: [f32; 4], position: usize) -> f32 = four[position & 3];
        fn multiply_add(a: f32, b: f32, c: f32) -> f32 = a * b + c;
        fn multiply(a: f32, b: f32) -> f32 = a * b;
        fn sum(value: f32) -> f32 = value;
    }

    #[inline(always)]
    unsafe fn zero() -> f32 {
        // The neutral element, as `Iterator::sum` has it.
        -0.0
    }

    #[inline(always)]
    unsafe fn store_pairs([first, second]: [f32; 2], p: *mut bf16) {
        (*p, *p.add(1)) = (bf16::from_f32(first), bf16::from_f32(second))
    }

    const OFFSET: i32 = 0;
    type Bytes = [i8; 4];
    type Sums = i32;
    type SumRows = [i32; ROWS];
    type Eight = [i8; 8];
    type Places = [u8; 4];
    type Scales = f32;

    instructions! {
        fn zero_sums() -> i32 = 0;
        fn zero_sum_rows() -> [i32; ROWS] = [0; ROWS];
        fn load_bytes(p: *const i8) -> [i8; 4] = p.cast::<[i8; 4]>().read();
        fn eight(p: *const i8) -> [i8; 8] = p.cast::<[i8; 8]>().read();
        fn pick_bytes(eight: [i8; 8], places: [u8; 4]) -> [i8; 4] = places.map(|place| eight[usize::from(place & 7)]);
        fn store_sums(sum: i32, p: *mut i32) = *p = sum;
        fn total(sum: i32) -> i32 = sum;
        fn low_nibbles(bytes: [i8; 4]) -> [i8; 4] = bytes.map(|byte| byte << 4);
        fn high_nibbles(bytes: [i8; 4]) -> [i8; 4] = bytes.map(|byte| byte & -16);
        fn add_scaled(sum: i32, scale: f32, out: *mut f32) = *out = (sum as f32).mul_add(scale, *out);
    }

    #[inline(always)]
    unsafe fn places(codes: *const u32, part: usize) -> [u8; 4] {
        // Two rows share eight bytes, of which four rows apart the next two bits are theirs.
        let first = part / 2 % 2 * 8 + part % 2 * 4;
        let byte = |i: usize| {
            let bits = *codes.cast::<u8>().add(first + i);
            bits >> (part / 4 * 2) & 3 | (i as u8 / 2 * 4)
        };
        [byte(0), byte(1), byte(2), byte(3)]
    }

    #[inline(always)]
    unsafe fn dot(x: [i8; 4], w: [i8; 4], sum: i32) -> i32 {
        x.iter().zip(w).fold(sum, |sum, (x, w)| sum + i32::from(*x) * i32::from(w))
    }

    #[inline(always)]
    unsafe fn nibble(bytes: [i8; 4], bit: u32) -> f32 {
        (i32::from_le_bytes(bytes.map(|byte| byte as u8)) << (28 - bit) >> 28) as f32
    }

    #[inline(always)]
    unsafe fn scales(header: *const u8, part: usize) -> f32 {
        header.cast::<f16>().add(part).read_unaligned().to_f32() / 16.0
    }
}
