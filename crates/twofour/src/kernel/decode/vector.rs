//! The few vector operations that kernels are written in.

use super::super::element::Load;

/// A register of f32 lanes.
///
/// # Safety
/// Every method may be called only on a CPU that has the implementor's instructions, and pointers must be valid for
/// [`Vector::LANES`] elements.
pub(in crate::kernel) unsafe trait Vector: Copy {
    /// f32 lanes, a multiple of 4 that divides 16.
    const LANES: usize;

    /// Zeros.
    unsafe fn zero() -> Self;

    /// One value in every lane.
    unsafe fn splat(value: f32) -> Self;

    /// Stores lanes.
    unsafe fn store(self, p: *mut f32);

    /// Loads lanes.
    unsafe fn load(p: *const f32) -> Self;

    /// Loads and widens lanes.
    unsafe fn widen<T: Load>(p: *const T) -> Self;

    /// `self * b + c`.
    unsafe fn multiply_add(self, b: Self, c: Self) -> Self;

    /// The sum of the lanes.
    unsafe fn sum(self) -> f32;

    /// Picks activations by metadata. Lane `i` takes the element of its 128-bit block whose number is in bits
    /// `2 * (i + STEP * LANES)` of `word` and the one above: from `even` where `i % 4 < 2`, from `odd` elsewhere.
    unsafe fn pick<const STEP: u32>(even: Self, odd: Self, word: u32) -> Self;
}

/// Columns that one metadata word describes.
pub(in crate::kernel) const WORD_COLUMNS: usize = 32;

/// Values kept of them.
pub(in crate::kernel) const WORD_VALUES: usize = 16;

/// Puts activations in the order that [`Vector::pick`] wants: of each run of `2 * lanes` columns first the groups of
/// even number, then those of odd number. Completes the last word with zeros.
pub(super) fn interleave_groups(x: &[f32], lanes: usize) -> Vec<f32> {
    let mut out = vec![0.0; x.len().div_ceil(WORD_COLUMNS) * WORD_COLUMNS];
    for (run, x) in x.chunks(2 * lanes).enumerate() {
        for (group, four) in x.chunks(4).enumerate() {
            let to = run * 2 * lanes + group % 2 * lanes + group / 2 * 4;
            out[to..to + four.len()].copy_from_slice(four);
        }
    }
    out
}
