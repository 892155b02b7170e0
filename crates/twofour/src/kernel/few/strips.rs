//! How strips and tokens are walked: the same for every format and every instruction set.

use std::ops::Range;

use super::{Size, product};
use crate::kernel::{
    arguments::Sums,
    engine::Cpu,
    format::Format,
    strips::{ROWS, StripsRef},
    vector::{Has, Vector, Work},
};

/// The tokens of each pass: as few passes of at most `most` tokens as can be, of as equal numbers of tokens as can be.
#[inline(always)]
pub(in crate::kernel) fn passes(tokens: usize, most: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    let count = tokens.div_ceil(most);
    let (least, longer) = (tokens / count.max(1), tokens % count.max(1));
    let start = move |pass: usize| pass * least + pass.min(longer);
    (0..count).map(move |pass| start(pass)..start(pass + 1))
}

/// `x · Wᵀ`: activations are in the order that [`Format::sums`] reads.
pub(in crate::kernel) fn multiply<F: Format>(
    cpu: Cpu,
    weight: StripsRef<'_, F>,
    x: &[F::Activation],
    tokens: usize,
) -> Sums<F::Sum> {
    let size = Size { rows: weight.shape.rows, bytes: weight.bytes() };
    product(size, x, tokens, |range, stride, out| {
        cpu.run(Walk::new(weight, range, x, stride, out));
    })
}

/// Some strips that are multiplied with all tokens of `stride` activations each: `[strip, token, ROWS]`. Where the
/// registers allow, several strips are read side by side, each of them sequentially: the memory system serves a few
/// long streams better than one.
pub(in crate::kernel) struct Walk<'a, F: Format> {
    weight: StripsRef<'a, F>,
    range: Range<usize>,
    x: &'a [F::Activation],
    stride: usize,
    out: &'a mut [F::Sum],
    tokens: usize,
}

impl<F: Format> Work for Walk<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(mut self, _: Has<V>) {
        let most = const { least(F::TOKENS, V::TOKENS) };
        let widest = passes(self.tokens, most).next().map_or(1, |pass| pass.len());
        // SAFETY: the CPU has the instructions, of which there is proof.
        unsafe {
            match const { held::<V, F>() } / widest {
                0 | 1 => self.side_by_side::<V, 1>(),
                2 | 3 => self.side_by_side::<V, 2>(),
                _ => self.side_by_side::<V, 4>(),
            }
        }
    }
}

/// Sums that registers hold.
const fn held<V: Vector, F: Format>() -> usize {
    if F::BYTES { V::BYTE_SUMS } else { V::SUMS }
}

const fn least(a: usize, b: usize) -> usize {
    if a < b { a } else { b }
}

impl<'a, F: Format> Walk<'a, F> {
    /// # Panics
    /// Where lengths do not fit.
    #[inline(always)]
    pub(in crate::kernel) fn new(
        weight: StripsRef<'a, F>,
        range: Range<usize>,
        x: &'a [F::Activation],
        stride: usize,
        out: &'a mut [F::Sum],
    ) -> Self {
        let tokens = x.len() / stride;
        assert!(stride >= weight.shape.padded_cols() && out.len() == range.len() * tokens * ROWS);
        Walk { weight, range, x, stride, out, tokens }
    }

    /// Walks `S` parts of the range side by side, then what is left.
    ///
    /// # Safety
    /// The CPU has `V`'s instructions.
    #[inline(always)]
    unsafe fn side_by_side<V: Vector, const S: usize>(&mut self) {
        let length = self.range.len() / S;
        for step in 0..length {
            // SAFETY: as this function requires; the strips are inside the range.
            unsafe { self.all_tokens::<V, S>(std::array::from_fn::<usize, S, _>(|s| s * length + step)) };
        }
        for strip in S * length..self.range.len() {
            // SAFETY: as this function requires; the strip is inside the range.
            unsafe { self.all_tokens::<V, 1>([strip]) };
        }
    }

    /// Multiplies `S` strips, counted from the range's start, with all tokens: between passes they stay in the second
    /// cache.
    ///
    /// # Safety
    /// The CPU has `V`'s instructions.
    #[inline(always)]
    unsafe fn all_tokens<V: Vector, const S: usize>(&mut self, strips: [usize; S]) {
        for tokens in passes(self.tokens, const { least(F::TOKENS, V::TOKENS) }) {
            // By cases; those whose sums are too many for the registers compile to nothing.
            macro_rules! cases {
                ($($n:literal)*) => {
                    match tokens.len() {
                        // SAFETY: as this function requires; there are as many tokens as the pass has.
                        $($n if const { $n <= least(F::TOKENS, V::TOKENS) && S * $n <= held::<V, F>() } => unsafe {
                            self.pass::<V, S, $n>(strips, tokens.start)
                        },)*
                        _ => unreachable!("the sums of a pass fit the registers"),
                    }
                };
            }
            cases!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16);
        }
    }

    /// Multiplies `S` strips with `N` tokens from `first` on.
    ///
    /// # Safety
    /// The CPU has `V`'s instructions; there are so many tokens.
    #[inline(always)]
    unsafe fn pass<V: Vector, const S: usize, const N: usize>(&mut self, strips: [usize; S], first: usize) {
        let x = self.x[first * self.stride..][..N * self.stride].as_ptr();
        let sums = strips.map(|strip| (strip * self.tokens + first) * ROWS);
        assert!(sums.iter().all(|start| start + N * ROWS <= self.out.len()));
        // All pointers come from one borrow of the slice, so that none is invalid when another is used.
        let out = self.out.as_mut_ptr();
        // SAFETY: by the assertion, `out` has `N` tokens' sums from each start on. The strips are of one weight, `x`
        // has `N * stride` activations, which `new` checked to cover the padded columns, and the CPU has the
        // instructions, as this function requires.
        unsafe {
            let out: [[_; N]; S] = sums.map(|start| std::array::from_fn(|n| out.add(start + n * ROWS)));
            let mut of = [self.weight.strip_of(self.range.start + strips[0]); S];
            for s in 1..S {
                of[s] = self.weight.strip_of(self.range.start + strips[s]);
            }
            F::sums::<V, S, N>(of, x, self.stride, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::passes;

    #[test]
    fn passes_are_few_and_of_equal_length() {
        for tokens in 0..100 {
            for most in [3, 4, 16] {
                let all: Vec<_> = passes(tokens, most).collect();
                assert_eq!(all.len(), tokens.div_ceil(most));
                let mut end = 0;
                for pass in &all {
                    assert_eq!(pass.start, end);
                    assert!(pass.len() == tokens / all.len() || pass.len() == tokens.div_ceil(all.len()));
                    end = pass.end;
                }
                assert_eq!(end, tokens);
            }
        }
    }
}
