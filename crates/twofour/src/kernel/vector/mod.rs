//! Instruction sets: the operations that loops are written in, and a file for each set that implements them.
//!
//! A further set is a file here, its `mod` and its row in the table below.

/// Operations of a [`Vector`] that are one expression each: a row of the table is a method.
macro_rules! instructions {
    ($(fn $name:ident($($argument:tt: $type:ty),*) $(-> $result:ty)? = $value:expr;)*) => {
        $(#[inline(always)] unsafe fn $name($($argument: $type),*) $(-> $result)? { $value })*
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

use std::{fmt::Debug, marker::PhantomData, ops::IndexMut};

use half::{bf16, f16};

use super::engine::instruction_sets;
#[cfg(target_arch = "x86_64")]
use super::tile::Amx;

instruction_sets! {
    /// Portable Rust: the reference.
    Scalar = "scalar": all(), scalar::Scalar;
    /// NEON (64-bit ARM).
    Neon = "neon": target_arch = "aarch64", neon::Neon;
    /// AVX2, FMA and F16C (Intel from Haswell, AMD from Zen on).
    Avx2 = "avx2": target_arch = "x86_64", avx2::Avx2;
    /// AVX-512 with VNNI, VBMI and BF16 (Intel from Sapphire Rapids, AMD from Zen 4 on). bf16 weights meet bf16
    /// activations in `vdpbf16ps`; AVX2 widens both to f32.
    Avx512 = "avx512": target_arch = "x86_64", avx512::Avx512;
    /// AVX-512 and AMX tiles for bf16 and int8 (Intel from Sapphire Rapids on).
    Amx = "amx": target_arch = "x86_64", avx512::Avx512, Amx;
}

/// Proof that this CPU has the instructions of `V`.
#[derive(Debug, Clone, Copy)]
pub struct Has<V>(PhantomData<V>);

impl<V: Vector> Has<V> {
    /// The proof.
    ///
    /// # Safety
    /// [`Vector::is_available`] has returned true.
    pub(super) unsafe fn new() -> Self {
        Self(PhantomData)
    }

    /// Does work that is compiled for these instructions.
    #[inline(always)]
    pub(super) fn run<W: Work>(self, work: W) -> W::Output {
        // SAFETY: a `Has<V>` exists only where the CPU has the instructions.
        unsafe { V::run(self, work) }
    }
}

/// Work that is compiled anew for each instruction set, with its instructions enabled.
///
/// A trait and not a closure: LLVM must inline the work into a function that has the instructions enabled, or else
/// every intrinsic becomes a call, and only a function can be marked for that. So [`Work::run`], and what it calls in a
/// loop, is `#[inline(always)]`.
pub trait Work {
    /// What it returns.
    type Output;

    /// Does the work.
    fn run<V: Vector>(self, has: Has<V>) -> Self::Output;
}

/// Tokens from which a product is computed by the loops for many tokens.
#[derive(Debug, Clone, Copy)]
pub struct Many {
    /// `x · Wᵀ`, 2:4: listing what is kept must pay.
    pub(super) sparse: usize,
    /// `x · Wᵀ`, dense.
    pub(super) dense: usize,
    /// `dy · W`.
    pub(super) gradient: usize,
    /// `aᵀ · b`.
    pub(super) transposed: usize,
}

/// An instruction set: registers and what the loops do with them.
///
/// The rows of a strip are sixteen lanes: one register of AVX-512, two of AVX2 and so on, which are called parts.
///
/// # Safety
/// Methods may be called only where [`Vector::is_available`] returns true, but for those that are not marked `unsafe`.
/// Pointers must be valid for what is read or written: a register, where nothing else is said. Implementors must read
/// and write no more than that.
pub unsafe trait Vector: Copy + Debug + Send + Sync + 'static {
    /// Whether this machine has the instructions.
    fn is_available() -> bool;

    /// Does work in a function that has the instructions enabled.
    unsafe fn run<W: Work>(has: Has<Self>, work: W) -> W::Output;

    /// Where the loops for few and for many tokens cross (on a Zen 3 and on an Emerald Rapids alike).
    const MANY: Many = Many { sparse: 96, dense: 48, gradient: 2, transposed: 0 };

    /// The product of bf16 weights and bf16 activations in instructions of its own, where the set has them; without
    /// them both are widened.
    const PAIRS: Option<super::format::PairProducts> = None;

    /// f32 lanes of a register: a divisor of the rows of a strip.
    const LANES: usize;

    /// Tokens that are multiplied in one pass over a strip, at most; a format may have fewer.
    const TOKENS: usize;

    /// Sums, of a strip's rows with a token each, that the registers hold beside all else: at least [`Vector::TOKENS`].
    /// Where they are enough, 2 or 4 strips are walked side by side.
    const SUMS: usize;

    /// The same of int8, whose loop needs more registers for all else.
    const BYTE_SUMS: usize = Self::SUMS;

    /// Tokens that are multiplied in one pass over dense rows of f32, f16 or bf16, and of int8: 1 to 4.
    const DENSE_TOKENS: [usize; 2];

    /// Registers of tokens in the widest panel that lists are multiplied with, 12 or fewer, and the depth of a block of
    /// lists: a multiple of a group.
    const LISTS: [usize; 2] = [12, 64];

    /// Outputs of a dense tile.
    const TILE_OUTS: usize = 6;

    /// Registers of tokens in the widest panel that dense tiles are multiplied with, 3 or fewer, and the depth of a
    /// block of tiles.
    const TILES: [usize; 2] = [2, 256];

    /// Asks for a cache line, into the first cache; any address will do.
    fn prefetch(_: *const u8) {}

    /// The same, into the second cache.
    fn prefetch_second(_: *const u8) {}

    // ---- Floats.

    /// [`Vector::LANES`] numbers.
    type Floats: Copy;

    /// A number for each row of a strip: as many registers as a strip has parts.
    type FloatRows: Copy + IndexMut<usize, Output = Self::Floats>;

    /// Four activations, as [`Vector::pick`] wants them.
    type Four: Copy;

    /// A place among four for each lane.
    type Positions: Copy;

    /// A sum of no terms.
    unsafe fn zero() -> Self::Floats;

    /// Zeros.
    unsafe fn zero_rows() -> Self::FloatRows;

    /// One value in every lane.
    unsafe fn splat(value: f32) -> Self::Floats;

    /// Loads lanes.
    unsafe fn load(p: *const f32) -> Self::Floats;

    /// Loads lanes of f16 and widens them.
    unsafe fn load_f16(p: *const f16) -> Self::Floats;

    /// Loads lanes of bf16 and widens them.
    unsafe fn load_bf16(p: *const bf16) -> Self::Floats;

    /// Loads a pair of bf16 for each lane and widens the first values and the second ones.
    unsafe fn load_pairs(p: *const bf16) -> [Self::Floats; 2];

    /// Stores lanes.
    unsafe fn store(values: Self::Floats, p: *mut f32);

    /// Rounds to bf16, to nearest and ties to even, and stores a pair for each lane; the values are finite.
    unsafe fn store_pairs(values: [Self::Floats; 2], p: *mut bf16);

    /// The four activations at `p`.
    unsafe fn four(p: *const f32) -> Self::Four;

    /// The positions that a word holds for a part of a strip's rows: two bits for each row.
    unsafe fn positions(word: u32, part: usize) -> Self::Positions;

    /// Picks for each lane one of the four.
    unsafe fn pick(four: Self::Four, positions: Self::Positions) -> Self::Floats;

    /// `a * b + c`.
    unsafe fn multiply_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// `a * b`.
    unsafe fn multiply(a: Self::Floats, b: Self::Floats) -> Self::Floats;

    /// The sum of the lanes.
    unsafe fn sum(values: Self::Floats) -> f32;

    /// Stores the transpose of the four columns of four numbers at `columns`: a row at each of `rows`.
    unsafe fn transpose(columns: [*const f32; 4], rows: [*mut f32; 4]) {
        for (i, row) in rows.into_iter().enumerate() {
            for (j, column) in columns.into_iter().enumerate() {
                // SAFETY: four numbers are at each pointer, as the trait requires.
                unsafe { *row.add(j) = *column.add(i) };
            }
        }
    }

    /// See [`super::many::kept_columns::list`], which does the same lane by lane.
    unsafe fn list_columns<T: super::KernelElement>(
        strip: super::strips::Strip<'_, T>,
        groups: std::ops::Range<usize>,
        rows: super::many::kept_columns::StripRows,
        lists: &mut super::many::kept_columns::ColumnLists,
    ) {
        super::many::kept_columns::list(strip, groups, rows, lists);
    }

    // ---- Integers.

    /// What is added to activations to suit the instructions; the sums are corrected by it.
    const OFFSET: i32;

    /// How far ahead of its reading a strip of integers is fetched, in bytes (measured, on a Zen 5).
    const AHEAD: usize = 1600;

    /// Four bytes for each lane.
    type Bytes: Copy;

    /// An i32 for each lane.
    type Sums: Copy;

    /// An i32 for each row of a strip.
    type SumRows: Copy + IndexMut<usize, Output = Self::Sums>;

    /// Eight activations, as [`Vector::pick_bytes`] wants them.
    type Eight: Copy;

    /// A place among eight for each byte.
    type Places: Copy;

    /// Scales of a part of a strip's rows.
    type Scales: Copy;

    /// Zeros.
    unsafe fn zero_sums() -> Self::Sums;

    /// Zeros.
    unsafe fn zero_sum_rows() -> Self::SumRows;

    /// Loads a register.
    unsafe fn load_bytes(p: *const i8) -> Self::Bytes;

    /// The eight activations at `p`.
    unsafe fn eight(p: *const i8) -> Self::Eight;

    /// From the four words of a line, the places of the four values of each row of a part: two are of the first four
    /// activations, two of the second four.
    unsafe fn places(codes: *const u32, part: usize) -> Self::Places;

    /// Picks for each byte one of the eight.
    unsafe fn pick_bytes(eight: Self::Eight, places: Self::Places) -> Self::Bytes;

    /// Adds the products of four activations and four weights to the sum of each lane. Activations are -127 to 127
    /// before [`Vector::OFFSET`] is added.
    unsafe fn dot(x: Self::Bytes, w: Self::Bytes, sums: Self::Sums) -> Self::Sums;

    /// Stores lanes.
    unsafe fn store_sums(sums: Self::Sums, p: *mut i32);

    /// The sum of the lanes.
    unsafe fn total(sums: Self::Sums) -> i32;

    /// The lower four bits of each byte in the upper four, the lower zero: sixteen times a four-bit integer.
    unsafe fn low_nibbles(bytes: Self::Bytes) -> Self::Bytes;

    /// The upper four bits of each byte, the lower zero.
    unsafe fn high_nibbles(bytes: Self::Bytes) -> Self::Bytes;

    /// The four-bit integer that starts at `bit` of each lane's four bytes, as a float.
    unsafe fn nibble(bytes: Self::Bytes, bit: u32) -> Self::Floats;

    /// From a block's sixteen words of positions in the order of integers (see [`places`](Vector::places)), those in
    /// the order of floats: a word for the first values of a group, and one for the second, with two bits for each row.
    unsafe fn float_positions(from: *const u32, to: *mut u32) {
        // SAFETY: sixteen words are read and written, as the trait requires.
        let (from, to) = unsafe { (&*from.cast::<[[[u8; 4]; 4]; 4]>(), &mut *to.cast::<[[u32; 4]; 4]>()) };
        for (line, words) in from.iter().zip(to) {
            for (i, word) in words.iter_mut().enumerate() {
                *word = turned(u32::from_le_bytes([line[0][i], line[1][i], line[2][i], line[3][i]]));
            }
        }
    }

    /// From a header of int4, sixteen f16 scales and then sixteen i16 sums of the rows' integers, the scales of a part
    /// of the rows.
    unsafe fn scales(header: *const u8, part: usize) -> Self::Scales;

    /// Adds sums of sixteen-fold integers by activations, corrected for [`Vector::OFFSET`] and times the scales, to a
    /// register's worth of f32 at `out`.
    unsafe fn add_scaled(sums: Self::Sums, scales: Self::Scales, out: *mut f32);
}

/// Parts of the rows of a strip.
pub(super) const fn parts<V: Vector>() -> usize {
    super::strips::ROWS / V::LANES
}

/// The transpose of four by four pairs of bits.
#[inline(always)]
fn turned(word: u32) -> u32 {
    let odd = (word ^ word >> 6) & 0x00CC_00CC;
    let word = word ^ odd ^ odd << 6;
    let upper = (word ^ word >> 12) & 0x0000_F0F0;
    word ^ upper ^ upper << 12
}

#[cfg(test)]
mod tests {
    use super::turned;

    #[test]
    fn pairs_of_bits_change_places_with_their_bytes() {
        for (from, to) in (0..16).map(|i| (i, i % 4 * 4 + i / 4)) {
            for bits in 1..4 {
                assert_eq!(turned(bits << (2 * from)), bits << (2 * to));
            }
        }
    }
}
