//! Weight formats: what a kept value is, where it lies in a strip, and the loop that multiplies strips with few tokens.
//!
//! A further format is a file here with an `impl Format`.

mod bf16;
mod f16;
mod f32;
mod floats;
pub(super) mod int4;
pub(super) mod int8;

use bytemuck::Pod;

use super::{
    aligned::CACHE_LINE,
    arguments::Sums,
    dense::Rows,
    engine::Cpu,
    epilogue::Epilogue,
    strips::{ROWS, Strip, StripsRef},
    vector::Vector,
};
use crate::{Arithmetic, Element};

/// A format of weights, named by its element: f32, f16, bf16, i8, or [`Int4`](crate::int4::Int4).
///
/// A strip is a sequence of blocks of 32 columns: a cache line of positions, and the lines that these are of. See [the
/// drawing](super).
///
/// # Safety
/// [`Format::sums`] reads no more than the strips and, of each token, the activations of their columns, completed to
/// whole lines.
pub unsafe trait Format: Sized + Send + Sync + 'static {
    /// A kept value, as the canonical form has it.
    type Value: Element;

    /// What lines are made of.
    type Stored: Pod + Send + Sync;

    /// What activations are made of.
    type Activation: Pod + Send + Sync;

    /// What a dot product is.
    type Sum: Pod + Send + Sync;

    /// What shares a scale, where scales lie in the strips.
    type Grouping: Copy + std::fmt::Debug + Send + Sync;

    /// What a weight keeps beside its strips.
    type Beside<'a>: Clone + std::fmt::Debug + Send + Sync;

    /// Groups of a line.
    const GROUPS: usize;

    /// Bytes of a line's values.
    const LINE_BYTES: usize;

    /// Words of positions of a line.
    const CODE_WORDS: usize = 2 * Self::GROUPS;

    /// Lines of a block, all but the last of a strip.
    const BLOCK_LINES: usize = CACHE_LINE / (Self::CODE_WORDS * size_of::<u32>());

    /// Bytes of such a block.
    const BLOCK_BYTES: usize = CACHE_LINE + Self::BLOCK_LINES * Self::LINE_BYTES;

    /// Tokens that are multiplied in one pass over a strip, where registers hold their sums: 16 or fewer.
    const TOKENS: usize;

    /// Whether values are whole bytes, whose loop needs more registers beside the sums.
    const BYTES: bool = false;

    /// Which value of a line it is: `row` of the strip, `group` of the line, first or second (`which`).
    fn value(row: usize, group: usize, which: usize) -> usize;

    /// The word and the bit where its position is.
    fn code(row: usize, group: usize, which: usize) -> (usize, u32);

    /// A value of a line.
    fn get(line: &[Self::Stored], value: usize) -> Self::Value;

    /// Stores a value of a line, whose bits are zero before.
    fn put(line: &mut [Self::Stored], value: usize, kept: Self::Value);

    /// Bytes of what lies beside the strips.
    fn bytes_beside(_: &Self::Beside<'_>) -> usize {
        0
    }

    /// The same, borrowed.
    fn borrow<'a>(beside: &'a Self::Beside<'_>) -> Self::Beside<'a>;

    /// Headers of a strip: cache lines with scales.
    #[inline(always)]
    fn headers(_cols: usize, _: Self::Grouping) -> usize {
        0
    }

    /// Where a block starts in a strip, in bytes.
    #[inline(always)]
    fn block_start(block: usize, _: Self::Grouping) -> usize {
        block * Self::BLOCK_BYTES
    }

    /// Sums of `S` strips with `N` tokens: `out[strip][token]` is valid for sixteen sums. The activations are `N *
    /// stride` from `x` on: token by token, or in the order in which the format prepares those of a pass.
    ///
    /// # Safety
    /// The CPU has `V`'s instructions; the strips are of one weight, `x` is valid for `N * stride` activations and
    /// `stride` covers the weight's padded columns.
    unsafe fn sums<V: Vector, const S: usize, const N: usize>(
        strips: [Strip<'_, Self>; S],
        x: *const Self::Activation,
        stride: usize,
        out: [[*mut Self::Sum; N]; S],
    );
}

/// A block of a strip.
pub(super) struct Block {
    /// Where it starts, in bytes.
    pub(super) start: usize,
    /// Its first line.
    pub(super) first: usize,
    /// How many lines it has.
    pub(super) count: usize,
}

/// The blocks of a strip of so many lines, of a format without headers.
#[inline(always)]
pub(super) fn blocks<F: Format>(lines: usize) -> impl Iterator<Item = Block> {
    (0..lines.div_ceil(F::BLOCK_LINES)).map(move |block| {
        let first = block * F::BLOCK_LINES;
        Block { start: block * F::BLOCK_BYTES, first, count: (lines - first).min(F::BLOCK_LINES) }
    })
}

/// A format that dense weights have, too.
///
/// # Safety
/// [`DenseFormat::dots`] reads no rows but those given, and no more than [`DenseFormat::completed`] activations of a
/// token.
pub unsafe trait DenseFormat: Format {
    /// Activations that a token must have, where the weight has so many columns.
    fn completed(cols: usize) -> usize;

    /// Tokens whose sums, with all else, fit the registers of `V`: 1 to 4.
    fn dense_tokens<V: Vector>() -> usize;

    /// Dot products of rows of a dense weight with `N` tokens.
    ///
    /// # Safety
    /// The CPU has `V`'s instructions; `rows` are rows of the weight; each of `x` is a token's activations, completed
    /// as the format needs them.
    unsafe fn dots<V: Vector, const R: usize, const N: usize>(
        weight: Rows<'_, Self::Stored>,
        rows: [usize; R],
        x: [*const Self::Activation; N],
    ) -> [[Self::Sum; N]; R];
}

/// f32, bf16 or f16: what weights and activations of a float kernel are made of. Products accumulate in f32.
pub trait KernelElement:
    Arithmetic
    + DenseFormat
    + for<'a> Format<Value = Self, Stored = Self, Activation = f32, Sum = f32, Grouping = (), Beside<'a> = ()>
{
    /// Loads lanes and widens them.
    ///
    /// # Safety
    /// The CPU has `V`'s instructions; `p` is valid for `V::LANES` elements.
    unsafe fn load<V: Vector>(p: *const Self) -> V::Floats;

    /// Loads the first and the second values of a part of a line's rows and widens them.
    ///
    /// # Safety
    /// The CPU has `V`'s instructions; `line` is a line, and the strip has the part.
    unsafe fn load_line<V: Vector>(line: *const Self, part: usize) -> [V::Floats; 2];

    /// `y = act(x · Wᵀ + bias)` in instructions for this type; false, and nothing done, where the CPU has none. Lengths
    /// are checked.
    #[doc(hidden)]
    fn own_linear(_: Cpu, _: Weight<'_, Self>, _: Tokens<'_, Self>, _: &mut [Self]) -> bool {
        false
    }
}

/// A weight to be multiplied.
#[derive(Debug)]
pub enum Weight<'a, F: Format> {
    /// 2:4.
    Sparse(StripsRef<'a, F>),
    /// Dense.
    Dense(Rows<'a, F::Stored>),
}

impl<F: Format> Clone for Weight<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<F: Format> Copy for Weight<'_, F> {}

/// What a product is called with, beside the weight.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a, T> {
    /// `[count, in_features]`.
    pub(super) x: &'a [T],
    pub(super) count: usize,
    pub(super) epilogue: Epilogue<'a>,
}

/// Products of bf16 weights and bf16 activations, `x · Wᵀ` of `[tokens, cols]`, in instructions for them.
///
/// Their functions may be called only on a CPU that has the instructions of the [`Vector`] that has these products.
#[derive(Debug, Clone, Copy)]
pub struct PairProducts {
    pub(super) sparse: unsafe fn(StripsRef<'_, half::bf16>, &[half::bf16], usize) -> Sums<f32>,
    pub(super) dense: unsafe fn(Rows<'_, half::bf16>, &[half::bf16], usize) -> Sums<f32>,
}

const _: () = assert!(ROWS == 16, "positions of a line are words of sixteen pairs of bits");
