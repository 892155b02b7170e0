//! Few tokens: every weight is read once and the memory is what limits.
//!
//! Strips of rows are split among threads, and each thread multiplies a strip with all tokens before it goes on to the next, so
//! that the weight comes from memory once. Sums are kept as `[strip, token, ROWS]` until they are stored.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "x86_64")]
mod dense;
mod int8;
#[cfg(target_arch = "x86_64")]
mod strips;
#[cfg(target_arch = "x86_64")]
pub(super) mod vector;

use std::{ops::Range, time::Duration};

use bytemuck::Zeroable;

use super::{
    Engine, KernelElement,
    aligned::Aligned,
    arguments::Sums,
    reference,
    scratch::Scratch,
    share::{share_expecting, threads},
    strips::{ROWS, Strips},
};
pub(super) use int8::prepare as prepare_bytes;

/// Parts of a product for each thread, at most: a few even out what else the machine is doing.
const PARTS: usize = 8;

/// Bytes of a weight from which it is worth a second thread, even one that is awake: about ten microseconds for one thread. What two threads hand to
/// each other, and each other's caches, takes one or two of them.
const LEAST_SHARED: usize = 1 << 20;

/// Bytes of the weight that a part has at least, from a core's own cache read in three microseconds or so.
const LEAST_PART: usize = 128 << 10;

/// Bytes of the weight that a core multiplies in a microsecond, from the last-level cache and with one token: so fast that a guess of the time with it
/// is rather too short.
const BYTES_PER_MICROSECOND: usize = 40_000;

/// Kernels walk so many strips at once, so parts are a multiple of it.
const SIDE_BY_SIDE: usize = 4;

/// A dense weight, or some rows of one.
#[derive(Debug)]
pub(super) struct DenseBlock<'a, T> {
    /// Rows.
    pub rows: usize,
    /// `[rows, cols]`.
    pub values: &'a [T],
    /// Columns.
    pub cols: usize,
}

impl<T> Clone for DenseBlock<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DenseBlock<'_, T> {}

impl<T> DenseBlock<'_, T> {
    /// The rows of some strips.
    fn strips(&self, strips: Range<usize>) -> Self {
        let rows = strips.start * ROWS..(strips.end * ROWS).min(self.rows);
        DenseBlock { rows: rows.len(), values: &self.values[rows.start * self.cols..rows.end * self.cols], ..*self }
    }
}

/// A weight that a thread can multiply a part of with a few tokens.
pub(super) trait Factor: Copy + Send + Sync {
    /// An activation: f32, or i8 for integer kernels.
    type Activation: Copy + Sync;
    /// A dot product: f32, or i32 for integer kernels.
    type Sum: bytemuck::Pod + Send;
    /// How many rows it has.
    fn rows(&self) -> usize;
    /// How many bytes.
    fn bytes(&self) -> usize;
    /// Multiplies some strips with activations `stride` apart: `[strip, token, ROWS]`.
    fn multiply(
        &self,
        engine: Engine,
        strips: Range<usize>,
        x: &[Self::Activation],
        stride: usize,
        out: &mut [Self::Sum],
    );
}

/// `x · Wᵀ` for activations `[tokens, stride]` as the weight's kernel wants them.
pub(super) fn product<F: Factor>(engine: Engine, weight: F, x: &[F::Activation], tokens: usize) -> Sums<F::Sum> {
    let strips = weight.rows().div_ceil(ROWS);
    let mut sums = Sums { values: Scratch::take(strips * tokens * ROWS), stride: tokens };
    if sums.values.is_empty() || x.is_empty() {
        sums.values.fill(F::Sum::zeroed());
        return sums;
    }
    let stride = x.len() / tokens;
    let bytes = weight.bytes();
    let parts = if bytes < LEAST_SHARED { 1 } else { (bytes / LEAST_PART).min(PARTS * threads()) };
    let part = strips.div_ceil(parts).next_multiple_of(SIDE_BY_SIDE);
    let expected = Duration::from_micros((bytes / BYTES_PER_MICROSECOND) as u64);
    let multiply = |(i, out): (usize, &mut [F::Sum])| {
        weight.multiply(engine, i * part..(i * part + part).min(strips), x, stride, out);
    };
    share_expecting(
        expected,
        sums.values.chunks_mut(part * tokens * ROWS).enumerate(),
        || (),
        |(), part| multiply(part),
    );
    sums
}

/// Widens activations, `[tokens, features]`, and completes each token with zeros: `[tokens, stride]`.
pub(super) fn prepare<T: KernelElement>(x: &[T], features: usize, stride: usize) -> Aligned<f32> {
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

impl<T: KernelElement> Factor for &Strips<T> {
    type Activation = f32;
    type Sum = f32;

    fn rows(&self) -> usize {
        Strips::rows(self)
    }

    fn bytes(&self) -> usize {
        Strips::bytes(self)
    }

    fn multiply(&self, engine: Engine, strips: Range<usize>, x: &[f32], stride: usize, out: &mut [f32]) {
        match engine {
            // SAFETY: an Engine is only handed out where Engine::available lists it, so the CPU has the instructions.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => unsafe { avx2::sparse(self, strips, x, stride, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx512 | Engine::Amx => unsafe { avx512::sparse(self, strips, x, stride, out) },
            _ => reference::sparse(self, strips, x, stride, out),
        }
    }
}

impl<T: KernelElement> Factor for DenseBlock<'_, T> {
    type Activation = f32;
    type Sum = f32;

    fn rows(&self) -> usize {
        self.rows
    }

    fn bytes(&self) -> usize {
        size_of_val(self.values)
    }

    fn multiply(&self, engine: Engine, strips: Range<usize>, x: &[f32], stride: usize, out: &mut [f32]) {
        let block = self.strips(strips);
        match engine {
            // SAFETY: an Engine is only handed out where Engine::available lists it.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx2 => unsafe { avx2::dense(block, x, stride, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Engine::Avx512 | Engine::Amx => unsafe { avx512::dense(block, x, stride, out) },
            _ => reference::dense(block, x, stride, out),
        }
    }
}

/// Asks for a cache line.
///
/// # Safety
/// The CPU has SSE; any address will do.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn prefetch(p: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch never faults.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
}
