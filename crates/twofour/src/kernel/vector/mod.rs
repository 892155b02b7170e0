//! The few vector operations that kernels are written in, and the CPUs' registers that implement them.

pub(super) mod avx2;
pub(super) mod avx512;
mod load;

pub(super) use load::Load;

/// A register of f32 lanes.
///
/// # Safety
/// Every method may be called only on a CPU that has the implementor's instructions, and pointers must be valid for
/// [`Vector::LANES`] elements where nothing else is said.
pub(in crate::kernel) unsafe trait Vector: Copy {
    /// f32 lanes: 8 or 16.
    const LANES: usize;

    /// A register of positions, one in the lowest two bits of each lane.
    type Positions: Copy;

    /// Zeros.
    unsafe fn zero() -> Self;

    /// One value in every lane.
    unsafe fn splat(value: f32) -> Self;

    /// The four values at `p` in every 128-bit block.
    unsafe fn splat_four(p: *const f32) -> Self;

    /// Stores lanes.
    unsafe fn store(self, p: *mut f32);

    /// Loads lanes.
    unsafe fn load(p: *const f32) -> Self;

    /// Loads and widens lanes.
    unsafe fn widen<T: Load>(p: *const T) -> Self;

    /// From a line of a strip the first and the second values of a register's worth of rows, from row `HALF * LANES` on.
    unsafe fn line<T: Load, const HALF: usize>(line: *const T) -> (Self, Self);

    /// The positions that a word holds for the rows from `HALF * LANES` on.
    unsafe fn positions<const HALF: usize>(word: u32) -> Self::Positions;

    /// Picks in each lane the element of its 128-bit block that `positions` says.
    unsafe fn pick(self, positions: Self::Positions) -> Self;

    /// `self * b + c`.
    unsafe fn multiply_add(self, b: Self, c: Self) -> Self;

    /// The sum of the lanes.
    unsafe fn sum(self) -> f32;
}

/// A register of bytes, or of i32 sums of their products.
///
/// # Safety
/// Every method may be called only on a CPU that has the implementor's instructions, and pointers must be valid for
/// what is read.
pub(in crate::kernel) unsafe trait ByteVector: Copy {
    /// Bytes of a register, a quarter of which are i32 lanes.
    const BYTES: usize;

    /// What is added to activations to suit the instructions; the sums are corrected by it.
    const OFFSET: i32;

    /// How far ahead of its reading a strip is fetched, in bytes (measured, on a Zen 5).
    const AHEAD: usize;

    /// Zeros.
    unsafe fn zero() -> Self;

    /// Loads a register.
    unsafe fn load(p: *const i8) -> Self;

    /// The eight bytes at `p` in every 64-bit lane.
    unsafe fn splat_eight(p: *const i8) -> Self;

    /// From the four words of a line, for each kept value of a register's worth of rows from row `HALF * BYTES / 4` on, its
    /// place among the eight activations of two groups.
    unsafe fn places<const HALF: usize>(codes: *const u32) -> Self;

    /// Picks in each 128-bit block the bytes that `places` says.
    unsafe fn pick(self, places: Self) -> Self;

    /// Adds products of activations (`self`) and weights to i32 sums.
    unsafe fn dot(self, w: Self, sums: Self) -> Self;

    /// Stores the i32 lanes.
    unsafe fn store(self, p: *mut i32);

    /// The lower four bits of each byte in the upper four, the lower zero: sixteen times a four-bit integer.
    unsafe fn low_nibbles(self) -> Self;

    /// The upper four bits of each byte, the lower zero.
    unsafe fn high_nibbles(self) -> Self;

    /// Scales of a register's worth of rows.
    type Scales: Copy;

    /// The scales of the rows from row `HALF * BYTES / 4` on. The header has sixteen f16 scales, and then sixteen i16 sums of the rows' integers, by which
    /// [`ByteVector::OFFSET`] is corrected.
    unsafe fn scales<const HALF: usize>(header: *const u8) -> Self::Scales;

    /// Adds i32 sums of sixteen-fold integers by activations, times the rows' scales, to a register's worth of f32 at `out`.
    unsafe fn add_scaled(self, scales: Self::Scales, out: *mut f32);

    /// The sum of the i32 lanes.
    unsafe fn sum(self) -> i32;
}

/// Asks for a cache line; any address will do.
#[inline(always)]
pub(in crate::kernel) fn prefetch(p: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: x86-64 has SSE, and a prefetch never faults, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
}
