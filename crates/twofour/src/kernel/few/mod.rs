//! Few tokens: every weight is read once and the memory is what limits.
//!
//! Strips of rows are split among threads, and each thread multiplies a strip with all tokens before it goes on to the
//! next, so that the weight comes from memory once. Sums are kept as `[strip, token, ROWS]` until they are stored.

pub(super) mod rows;
pub(super) mod strips;

use std::{ops::Range, time::Duration};

use bytemuck::Pod;

use super::{
    aligned::Aligned,
    arguments::Sums,
    format::KernelElement,
    scratch::Scratch,
    share::{share_expecting, threads},
    strips::ROWS,
};

/// Parts of a product for each thread, at most: a few even out what else the machine is doing.
const PARTS: usize = 8;

/// Bytes to multiply from which it is worth a second thread, even one that is awake: about ten microseconds for one
/// thread. What two threads hand to each other, and each other's caches, takes one or two of them.
const MIN_SHARED: usize = 1 << 20;

/// Bytes to multiply that a part has at least, from a core's own cache read in three microseconds or so.
const MIN_PART: usize = 128 << 10;

/// Tokens that a core multiplies with what it reads while it reads, roughly: more of them take as long as reading the
/// weight more than once.
const TOKENS_OF_A_READ: usize = 4;

/// Bytes of the weight that a core multiplies in a microsecond, from the last-level cache and with one token: so fast
/// that a guess of the time with it is rather too short.
const BYTES_PER_MICROSECOND: usize = 40_000;

/// Kernels walk so many strips at once, so parts are a multiple of it.
const SIDE_BY_SIDE: usize = 4;

/// A weight, of which a thread multiplies some strips: as many rows, and as many bytes to be read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Size {
    pub(super) rows: usize,
    pub(super) bytes: usize,
}

/// `x · Wᵀ` for activations `[tokens, stride]` as the weight's loop wants them. `multiply(strips, stride, out)`
/// multiplies some strips with all of them: `[strip, token, ROWS]`.
pub(super) fn product<A, S: Pod + Send>(
    Size { rows, bytes }: Size,
    x: &[A],
    tokens: usize,
    multiply: impl Fn(Range<usize>, usize, &mut [S]) + Sync,
) -> Sums<S> {
    let strips = rows.div_ceil(ROWS);
    let mut sums = Sums { values: Scratch::take(strips * tokens * ROWS), stride: tokens };
    if sums.values.is_empty() || x.is_empty() {
        sums.values.fill(S::zeroed());
        return sums;
    }
    let stride = x.len() / tokens;
    let bytes = bytes.saturating_mul((tokens / TOKENS_OF_A_READ).max(1));
    let parts = if bytes < MIN_SHARED { 1 } else { (bytes / MIN_PART).min(PARTS * threads()) };
    let part = strips.div_ceil(parts).next_multiple_of(SIDE_BY_SIDE);
    let expected = Duration::from_micros((bytes / BYTES_PER_MICROSECOND) as u64);
    share_expecting(
        expected,
        sums.values.chunks_mut(part * tokens * ROWS).enumerate(),
        || (),
        |(), (i, out)| multiply(i * part..(i * part + part).min(strips), stride, out),
    );
    sums
}

/// Widens activations, `[tokens, features]`, and completes each token with zeros: `[tokens, stride]`.
pub(super) fn widen<T: KernelElement>(x: &[T], features: usize, stride: usize) -> Aligned<f32> {
    let mut out = Aligned::zeroed(x.len().checked_div(features).unwrap_or(0) * stride);
    if features == 0 {
        return out;
    }
    for (x, out) in x.chunks_exact(features).zip(out.chunks_exact_mut(stride)) {
        for (x, out) in x.iter().zip(out) {
            *out = x.to_f32();
        }
    }
    out
}
