//! Few tokens by a dense weight, row by row.
//!
//! A thread walks [`STREAMS`] parts of its rows side by side, each of them sequentially, so that the memory system sees
//! a few long streams and the activations that are loaded serve several rows.

use std::ops::Range;

use super::{Size, product};
use crate::kernel::{
    arguments::Sums,
    dense::Rows,
    engine::Cpu,
    format::DenseFormat,
    strips::ROWS,
    vector::{Has, Vector, Work},
};

/// Parts of a block of rows that are read side by side.
pub(in crate::kernel) const STREAMS: usize = 4;

/// Rows of each stream that meet all tokens before the next rows do: they stay in the second cache.
const STEPS: usize = ROWS / STREAMS;

/// `x · Wᵀ`: activations are completed as [`DenseFormat::dots`] needs them.
pub(in crate::kernel) fn multiply<T: DenseFormat>(
    cpu: Cpu,
    weight: Rows<'_, T::Stored>,
    x: &[T::Activation],
    tokens: usize,
) -> Sums<T::Sum> {
    let size = Size { rows: weight.rows, bytes: size_of_val(weight.values) };
    product(size, x, tokens, |range, stride, out| {
        cpu.run(Walk::<T> { weight: weight.strips(range), x, stride, out });
    })
}

/// All rows, multiplied with all tokens, `stride` apart: `[strip, token, ROWS]`. Nothing need follow what the last
/// token is multiplied with.
pub(in crate::kernel) struct Walk<'a, T: DenseFormat> {
    pub(in crate::kernel) weight: Rows<'a, T::Stored>,
    pub(in crate::kernel) x: &'a [T::Activation],
    pub(in crate::kernel) stride: usize,
    pub(in crate::kernel) out: &'a mut [T::Sum],
}

impl<T: DenseFormat> Work for Walk<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, _: Has<V>) {
        let Self { weight, x, stride, out } = self;
        let tokens = x.len().div_ceil(stride);
        assert!(tokens == 0 || x.len() >= (tokens - 1) * stride + T::completed(weight.cols));
        let length = weight.rows.div_ceil(STREAMS);
        for start in (0..length).step_by(STEPS) {
            let steps = start..(start + STEPS).min(length);
            let mut first = 0;
            while first < tokens {
                // As few passes as can be, of as equal numbers of tokens as can be.
                let left = tokens - first;
                let n = left.div_ceil(left.div_ceil(T::dense_tokens::<V>()));
                // SAFETY: there is proof of the instructions, there are as many tokens as each pass takes, and they are
                // completed, by the assertion.
                unsafe {
                    match n {
                        1 => pass::<V, T, 1>(weight, steps.clone(), first, x, stride, out),
                        2 => pass::<V, T, 2>(weight, steps.clone(), first, x, stride, out),
                        3 => pass::<V, T, 3>(weight, steps.clone(), first, x, stride, out),
                        _ => pass::<V, T, 4>(weight, steps.clone(), first, x, stride, out),
                    }
                }
                first += n;
            }
        }
    }
}

/// Multiplies a few rows of each stream with `N` tokens from `first` on. A stream that has ended repeats its last row.
///
/// # Safety
/// The CPU has `V`'s instructions; there are `N` tokens from `first` on, of [`DenseFormat::completed`] activations or
/// more.
#[inline(always)]
unsafe fn pass<V: Vector, T: DenseFormat, const N: usize>(
    weight: Rows<'_, T::Stored>,
    steps: Range<usize>,
    first: usize,
    x: &[T::Activation],
    stride: usize,
    out: &mut [T::Sum],
) {
    let (tokens, rows) = (x.len().div_ceil(stride), weight.rows);
    let x: [*const T::Activation; N] = std::array::from_fn(|n| x[(first + n) * stride..].as_ptr());
    let length = rows.div_ceil(STREAMS);
    for step in steps {
        let rows: [usize; STREAMS] = std::array::from_fn(|s| (s * length + step).min(rows - 1));
        // SAFETY: as this function requires; `rows` are rows of the weight, and each of `x` is a token.
        let sums = unsafe { T::dots::<V, STREAMS, N>(weight, rows, x) };
        for (row, sums) in rows.into_iter().zip(sums) {
            for (n, sum) in sums.into_iter().enumerate() {
                out[(row / ROWS * tokens + first + n) * ROWS + row % ROWS] = sum;
            }
        }
    }
}
