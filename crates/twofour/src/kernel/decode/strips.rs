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
pub(super) struct Block<T> {
    /// Its first line.
    pub(super) first: usize,
    /// How many it has.
    pub(super) count: usize,
    /// Where its positions start, in bytes from the strip's start.
    pub(super) codes: usize,
    element: PhantomData<T>,
}

impl<T: Order> Block<T> {
    /// The blocks of a strip of so many lines.
    #[inline(always)]
    pub(super) fn of_strip(lines: usize) -> impl Iterator<Item = Self> {
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
    pub(super) unsafe fn line(&self, strip: *const u8, i: usize) -> (*const T, *const u32) {
        // SAFETY: the block is the strip's and has a line `i`, as this function requires, so both offsets stay inside the strip.
        unsafe {
            let codes = strip.add(self.codes);
            let values = codes.add(CACHE_LINE + i * T::LINE_BYTES);
            (values.cast(), codes.cast::<u32>().add(i * T::CODE_WORDS))
        }
    }
}

/// A kernel that multiplies a few strips with a few tokens.
///
/// A trait and not a closure: LLVM must inline the kernel into a function that has the instructions enabled, or else every
/// intrinsic becomes a call, and only a function can be marked for that.
///
/// # Safety
/// Implementations read no more than the strips and, of each token, the activations of their columns.
pub(super) unsafe trait StripKernel {
    /// What weights are made of.
    type Weight: Order;
    /// What activations are made of.
    type Activation;
    /// What a dot product is.
    type Sum: Copy;

    /// Tokens multiplied in one pass over some strips: 4 where the sums of four strips with as many tokens fit the registers,
    /// otherwise 3, with two strips (measured on Zen 3).
    const TOKENS: usize;

    /// Sums of `S` strips with `N` tokens: `out[strip][token]` is valid for [`ROWS`] sums.
    ///
    /// # Safety
    /// The CPU has the kernel's instructions; the strips are of one weight, each of `x` is valid for its padded columns.
    unsafe fn sums<const S: usize, const N: usize>(
        strips: [Strip<'_, Self::Weight>; S],
        x: [*const Self::Activation; N],
        out: [[*mut Self::Sum; N]; S],
    );
}

/// Multiplies some strips with all tokens, `stride` apart: `[strip, token, ROWS]`. Where the registers allow, several strips are read
/// side by side, each of them sequentially: the memory system serves a few long streams better than one.
///
/// # Safety
/// The CPU has the kernel's instructions.
#[inline(always)]
pub(super) unsafe fn walk<K: StripKernel>(
    weight: StripsRef<'_, K::Weight>,
    range: Range<usize>,
    x: &[K::Activation],
    stride: usize,
    out: &mut [K::Sum],
) {
    let tokens = x.len() / stride;
    assert!(stride >= weight.padded_cols() && out.len() == range.len() * tokens * ROWS);
    let mut walk = Walk::<K> { weight, range, x, stride, out, tokens, kernel: PhantomData };
    // SAFETY: the CPU has the kernel's instructions, as this function requires; the assertion checks all lengths.
    unsafe {
        match K::TOKENS {
            4 => walk.side_by_side::<4>(),
            _ if tokens == 1 => walk.side_by_side::<4>(),
            _ => walk.side_by_side::<2>(),
        }
    }
}

struct Walk<'a, K: StripKernel> {
    weight: StripsRef<'a, K::Weight>,
    range: Range<usize>,
    x: &'a [K::Activation],
    stride: usize,
    out: &'a mut [K::Sum],
    tokens: usize,
    kernel: PhantomData<K>,
}

impl<K: StripKernel> Walk<'_, K> {
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
        let mut first = 0;
        while first < self.tokens {
            // As few passes as can be, of as equal numbers of tokens as can be.
            let left = self.tokens - first;
            let n = left.div_ceil(left.div_ceil(K::TOKENS));
            // SAFETY: the CPU has the kernel's instructions, as this function requires; there are `n` tokens from `first` on.
            unsafe {
                match n {
                    1 => self.pass::<S, 1>(strips, first),
                    2 => self.pass::<S, 2>(strips, first),
                    3 => self.pass::<S, 3>(strips, first),
                    _ => self.pass::<S, 4>(strips, first),
                }
            }
            first += n;
        }
    }

    /// Multiplies `S` strips with `N` tokens from `first` on.
    ///
    /// # Safety
    /// As [`walk`]; there are so many tokens.
    #[inline(always)]
    unsafe fn pass<const S: usize, const N: usize>(&mut self, strips: [usize; S], first: usize) {
        let x: [_; N] = std::array::from_fn(|n| self.x[(first + n) * self.stride..][..self.stride].as_ptr());
        let sums = strips.map(|strip| (strip * self.tokens + first) * ROWS);
        assert!(sums.iter().all(|start| start + N * ROWS <= self.out.len()));
        // All pointers come from one borrow of the slice, so that none is invalid when another is used.
        let out = self.out.as_mut_ptr();
        // SAFETY: by the assertion, `out` has `N` tokens' sums from each start on. The strips are of one weight, each of `x` has `stride` elements, which
        // `walk` checked to be as many as the padded columns, and the CPU has the kernel's instructions, as this function requires.
        unsafe {
            let out = sums.map(|start| std::array::from_fn(|n| out.add(start + n * ROWS)));
            K::sums(strips.map(|strip| self.weight.strip(self.range.start + strip)), x, out);
        }
    }
}

/// The float kernel for the vectors `V`.
pub(super) struct FloatKernel<V, T>(PhantomData<(V, T)>);

// SAFETY: `sums` reads the strips' lines and four activations for each.
unsafe impl<V: Vector, T: KernelElement> StripKernel for FloatKernel<V, T> {
    type Weight = T;
    type Activation = f32;
    type Sum = f32;

    const TOKENS: usize = if V::LANES == ROWS { 4 } else { 3 };

    #[inline(always)]
    unsafe fn sums<const S: usize, const N: usize>(
        strips: [Strip<'_, T>; S],
        x: [*const f32; N],
        out: [[*mut f32; N]; S],
    ) {
        // SAFETY: all reads are inside the strips and the activations; prefetching may point anywhere.
        unsafe {
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
