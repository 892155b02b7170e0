//! Few tokens by a 2:4 weight in strips: how strips and tokens are walked, and the float kernel.
//!
//! For each group of columns the four activations stand in every 128-bit block of a register; a shuffle picks for each row
//! of the strip the one that its first, then its second value multiplies. Each lane is one row's sum.

use std::{marker::PhantomData, ops::Range};

use super::super::{
    aligned::CACHE_LINE,
    element::KernelElement,
    strips::{Order, ROWS, Strip, StripsRef},
    vector::{Vector, prefetch},
};

/// How far ahead of its reading a strip of floats is fetched, in bytes.
const AHEAD: usize = 1024;

/// A block of a strip: see [`Strips`].
pub(in crate::kernel) struct Block<T> {
    /// Its first line.
    pub(in crate::kernel) first: usize,
    /// How many it has.
    pub(in crate::kernel) count: usize,
    /// Where its positions start, in bytes from the strip's start.
    pub(in crate::kernel) codes: usize,
    element: PhantomData<T>,
}

impl<T: Order> Block<T> {
    /// The blocks of a strip of so many lines.
    #[inline(always)]
    pub(in crate::kernel) fn of_strip(lines: usize) -> impl Iterator<Item = Self> {
        (0..lines.div_ceil(T::BLOCK_LINES)).map(move |block| {
            let first = block * T::BLOCK_LINES;
            let count = (lines - first).min(T::BLOCK_LINES);
            Self { first, count, codes: block * T::BLOCK_BYTES, element: PhantomData }
        })
    }

    /// The values and positions of the block's line `i`, of the strip that starts there.
    ///
    /// # Safety
    /// The block is the strip's and has such a line.
    #[inline(always)]
    pub(in crate::kernel) unsafe fn line(&self, strip: *const u8, i: usize) -> (*const T, *const u32) {
        // SAFETY: the block is the strip's and has a line `i`, as this function requires, so both offsets stay inside the strip.
        unsafe {
            let codes = strip.add(self.codes);
            let values = codes.add(CACHE_LINE + i * T::LINE_BYTES);
            (values.cast(), codes.cast::<u32>().add(i * T::CODE_WORDS))
        }
    }
}

/// A weight in strips of [`ROWS`] rows.
pub(in crate::kernel) trait StripSource: Copy {
    /// A strip.
    type Strip: Copy;
    /// One strip.
    fn strip(&self, i: usize) -> Self::Strip;
    /// Columns to which activations must be completed.
    fn padded_cols(&self) -> usize;
}

#[cfg(target_arch = "x86_64")]
impl<'a, T: Order> StripSource for StripsRef<'a, T> {
    type Strip = Strip<'a, T>;

    #[inline(always)]
    fn strip(&self, i: usize) -> Strip<'a, T> {
        self.strip_of(i)
    }

    fn padded_cols(&self) -> usize {
        StripsRef::padded_cols(self)
    }
}

/// A kernel that multiplies a few strips with a few tokens.
///
/// A trait and not a closure: LLVM must inline the kernel into a function that has the instructions enabled, or else every
/// intrinsic becomes a call, and only a function can be marked for that.
///
/// # Safety
/// Implementations read no more than the strips and, of each token, the activations of their columns.
pub(in crate::kernel) unsafe trait StripKernel {
    /// A strip of the weight.
    type Strip<'a>: Copy;
    /// What activations are made of.
    type Activation;
    /// What a dot product is.
    type Sum: Copy;

    /// Tokens multiplied in one pass over some strips, at most: 16 or fewer.
    const TOKENS: usize;

    /// Sums, of a strip with a token each, that the registers hold beside all else: at least [`StripKernel::TOKENS`]. Where they are enough, 2 or 4 strips
    /// are walked side by side.
    const SUMS: usize;

    /// Sums of `S` strips with `N` tokens: `out[strip][token]` is valid for [`ROWS`] sums. The activations are `N * stride` from `x` on, in the order in
    /// which the kernel's preparation stores those of a pass: token by token, or interleaved.
    ///
    /// # Safety
    /// The CPU has the kernel's instructions; the strips are of one weight, `x` is valid for `N * stride` activations and `stride` covers the weight's padded columns.
    unsafe fn sums<const S: usize, const N: usize>(
        strips: [Self::Strip<'_>; S],
        x: *const Self::Activation,
        stride: usize,
        out: [[*mut Self::Sum; N]; S],
    );
}

/// The tokens of each pass: as few passes of at most `most` tokens as can be, of as equal numbers of tokens as can be.
#[inline(always)]
pub(in crate::kernel) fn passes(tokens: usize, most: usize) -> impl ExactSizeIterator<Item = Range<usize>> {
    let count = tokens.div_ceil(most);
    let (least, longer) = (tokens / count.max(1), tokens % count.max(1));
    let start = move |pass: usize| pass * least + pass.min(longer);
    (0..count).map(move |pass| start(pass)..start(pass + 1))
}

/// Multiplies some strips with all tokens of `stride` activations each: `[strip, token, ROWS]`. Where the registers allow, several strips are read
/// side by side, each of them sequentially: the memory system serves a few long streams better than one.
///
/// # Safety
/// The CPU has the kernel's instructions; the activations are in the order that the kernel's [`StripKernel::sums`] reads.
#[inline(always)]
pub(in crate::kernel) unsafe fn walk<'a, K: StripKernel, W: StripSource<Strip = K::Strip<'a>>>(
    weight: W,
    range: Range<usize>,
    x: &[K::Activation],
    stride: usize,
    out: &mut [K::Sum],
) {
    let tokens = x.len() / stride;
    assert!(stride >= weight.padded_cols() && out.len() == range.len() * tokens * ROWS);
    let widest = passes(tokens, K::TOKENS).next().map_or(1, |pass| pass.len());
    let mut walk = Walk::<K, W> { weight, range, x, stride, out, tokens, kernel: PhantomData };
    // SAFETY: the CPU has the kernel's instructions, as this function requires; the assertion checks all lengths.
    unsafe {
        match K::SUMS / widest {
            0 | 1 => walk.side_by_side::<1>(),
            2 | 3 => walk.side_by_side::<2>(),
            _ => walk.side_by_side::<4>(),
        }
    }
}

struct Walk<'a, K: StripKernel, W> {
    weight: W,
    range: Range<usize>,
    x: &'a [K::Activation],
    stride: usize,
    out: &'a mut [K::Sum],
    tokens: usize,
    kernel: PhantomData<K>,
}

impl<'a, K: StripKernel, W: StripSource<Strip = K::Strip<'a>>> Walk<'_, K, W> {
    /// Walks `S` parts of the range side by side, then what is left.
    ///
    /// # Safety
    /// As [`walk`].
    #[inline(always)]
    unsafe fn side_by_side<const S: usize>(&mut self) {
        let length = self.range.len() / S;
        for step in 0..length {
            // SAFETY: the CPU has the kernel's instructions, as this function requires; the strips are inside the range.
            unsafe { self.all_tokens(std::array::from_fn::<usize, S, _>(|s| s * length + step)) };
        }
        for strip in S * length..self.range.len() {
            // SAFETY: the CPU has the kernel's instructions, as this function requires; the strip is inside the range.
            unsafe { self.all_tokens([strip]) };
        }
    }

    /// Multiplies `S` strips, counted from the range's start, with all tokens: between passes they stay in the second cache.
    ///
    /// # Safety
    /// As [`walk`].
    #[inline(always)]
    unsafe fn all_tokens<const S: usize>(&mut self, strips: [usize; S]) {
        for tokens in passes(self.tokens, K::TOKENS) {
            // By cases; those whose sums are too many for the registers compile to nothing.
            macro_rules! cases {
                ($($n:literal)*) => {
                    match tokens.len() {
                        // SAFETY: the CPU has the kernel's instructions, as this function requires; there are as many tokens as the pass has.
                        $($n if const { $n <= K::TOKENS && S * $n <= K::SUMS } => unsafe { self.pass::<S, $n>(strips, tokens.start) },)*
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
    /// As [`walk`]; there are so many tokens.
    #[inline(always)]
    unsafe fn pass<const S: usize, const N: usize>(&mut self, strips: [usize; S], first: usize) {
        let x = self.x[first * self.stride..][..N * self.stride].as_ptr();
        let sums = strips.map(|strip| (strip * self.tokens + first) * ROWS);
        assert!(sums.iter().all(|start| start + N * ROWS <= self.out.len()));
        // All pointers come from one borrow of the slice, so that none is invalid when another is used.
        let out = self.out.as_mut_ptr();
        // SAFETY: by the assertion, `out` has `N` tokens' sums from each start on. The strips are of one weight, `x` has `N * stride` activations, which
        // `walk` checked to cover the padded columns, and the CPU has the kernel's instructions, as this function requires.
        unsafe {
            let out: [[_; N]; S] = sums.map(|start| std::array::from_fn(|n| out.add(start + n * ROWS)));
            K::sums(strips.map(|strip| self.weight.strip(self.range.start + strip)), x, self.stride, out);
        }
    }
}

/// The float kernel for the vectors `V`.
pub(super) struct FloatKernel<V, T>(PhantomData<(V, T)>);

// SAFETY: `sums` reads the strips' lines and four activations for each.
unsafe impl<V: Vector, T: KernelElement> StripKernel for FloatKernel<V, T> {
    type Strip<'a> = Strip<'a, T>;
    type Activation = f32;
    type Sum = f32;

    // Four strips with four tokens, or two with three where a register has half a strip's rows (measured on Zen 3).
    const TOKENS: usize = if V::LANES == ROWS { 4 } else { 3 };
    const SUMS: usize = if V::LANES == ROWS { 16 } else { 6 };

    #[inline(always)]
    unsafe fn sums<const S: usize, const N: usize>(
        strips: [Strip<'_, T>; S],
        x: *const f32,
        stride: usize,
        out: [[*mut f32; N]; S],
    ) {
        // SAFETY: all reads are inside the strips and the activations; prefetching may point anywhere.
        unsafe {
            let x: [_; N] = std::array::from_fn(|n| x.add(n * stride));
            let (mut low, mut high) = ([[V::zero(); N]; S], [[V::zero(); N]; S]);
            let start = strips.map(|strip| strip.as_ptr());
            for block in Block::<T>::of_strip(strips[0].lines()) {
                for strip in start {
                    prefetch(strip.wrapping_add(block.codes + AHEAD));
                }
                for i in 0..block.count {
                    let mut four = [V::zero(); N];
                    for n in 0..N {
                        four[n] = V::splat_four(x[n].add(4 * (block.first + i)));
                    }
                    for s in 0..S {
                        let (values, codes) = block.line(start[s], i);
                        for part in 0..T::LINE_BYTES / CACHE_LINE {
                            prefetch(values.cast::<u8>().wrapping_add(AHEAD + part * CACHE_LINE));
                        }
                        half::<V, T, 0, N>(values, *codes, *codes.add(1), &four, &mut low[s]);
                        if V::LANES < ROWS {
                            half::<V, T, 1, N>(values, *codes, *codes.add(1), &four, &mut high[s]);
                        }
                    }
                }
            }
            for s in 0..S {
                for n in 0..N {
                    low[s][n].store(out[s][n]);
                    if V::LANES < ROWS {
                        high[s][n].store(out[s][n].add(V::LANES));
                    }
                }
            }
        }
    }
}

/// Adds the products of a line, of the rows from `HALF * LANES` on, with `N` tokens.
///
/// # Safety
/// The CPU has `V`'s instructions; `values` is a line.
#[inline(always)]
unsafe fn half<V: Vector, T: KernelElement, const HALF: usize, const N: usize>(
    values: *const T,
    first: u32,
    second: u32,
    four: &[V; N],
    sums: &mut [V; N],
) {
    // SAFETY: the CPU has `V`'s instructions and `values` is a line, as this function requires.
    unsafe {
        let (w_first, w_second) = V::line::<T, HALF>(values);
        let (first, second) = (V::positions::<HALF>(first), V::positions::<HALF>(second));
        for n in 0..N {
            sums[n] = four[n].pick(first).multiply_add(w_first, sums[n]);
            sums[n] = four[n].pick(second).multiply_add(w_second, sums[n]);
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
