//! The few vector operations that float kernels are written in.

use super::super::element::Load;

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
