//! Few tokens: every weight is read once and the memory is what limits.
//!
//! Strips of rows are split among threads, and each thread multiplies a strip with all tokens before it goes on to the next, so
//! that the weight comes from memory once. Sums are kept as `[strip, token, ROWS]` until they are stored.
//!
//! The walks over strips and over dense rows also serve the kernels of AVX512_BF16 ([`super::bf16`]), for any number of tokens.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
pub(super) mod dense;
mod int8;
#[cfg(target_arch = "x86_64")]
pub(super) mod strips;

use std::{ops::Range, time::Duration};

use bytemuck::Zeroable;

use super::{
    aligned::Aligned,
    arguments::Sums,
    dense_block::DenseBlock,
    element::KernelElement,
    engine::Cpu,
    reference,
    scratch::Scratch,
    share::{share_expecting, threads},
    strips::{ROWS, StripsRef},
};
pub(super) use int8::prepare as prepare_bytes;

/// Parts of a product for each thread, at most: a few even out what else the machine is doing.
const PARTS: usize = 8;

/// Bytes to multiply from which it is worth a second thread, even one that is awake: about ten microseconds for one thread. What two threads hand to
/// each other, and each other's caches, takes one or two of them.
const LEAST_SHARED: usize = 1 << 20;

/// Bytes to multiply that a part has at least, from a core's own cache read in three microseconds or so.
const LEAST_PART: usize = 128 << 10;

/// Tokens that a core multiplies with what it reads while it reads, roughly: more of them take as long as reading the weight more than once.
const TOKENS_OF_A_READ: usize = 4;

/// Bytes of the weight that a core multiplies in a microsecond, from the last-level cache and with one token: so fast that a guess of the time with it
/// is rather too short.
const BYTES_PER_MICROSECOND: usize = 40_000;

/// Kernels walk so many strips at once, so parts are a multiple of it.
const SIDE_BY_SIDE: usize = 4;

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
    fn multiply(&self, cpu: Cpu, strips: Range<usize>, x: &[Self::Activation], stride: usize, out: &mut [Self::Sum]);
}

/// `x · Wᵀ` for activations `[tokens, stride]` as the weight's kernel wants them.
pub(super) fn product<F: Factor>(cpu: Cpu, weight: F, x: &[F::Activation], tokens: usize) -> Sums<F::Sum> {
    let strips = weight.rows().div_ceil(ROWS);
    let mut sums = Sums { values: Scratch::take(strips * tokens * ROWS), stride: tokens };
    if sums.values.is_empty() || x.is_empty() {
        sums.values.fill(F::Sum::zeroed());
        return sums;
    }
    let stride = x.len() / tokens;
    let bytes = weight.bytes().saturating_mul((tokens / TOKENS_OF_A_READ).max(1));
    let parts = if bytes < LEAST_SHARED { 1 } else { (bytes / LEAST_PART).min(PARTS * threads()) };
    let part = strips.div_ceil(parts).next_multiple_of(SIDE_BY_SIDE);
    let expected = Duration::from_micros((bytes / BYTES_PER_MICROSECOND) as u64);
    let multiply = |(i, out): (usize, &mut [F::Sum])| {
        weight.multiply(cpu, i * part..(i * part + part).min(strips), x, stride, out);
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

impl<T: KernelElement> Factor for StripsRef<'_, T> {
    type Activation = f32;
    type Sum = f32;

    fn rows(&self) -> usize {
        StripsRef::rows(self)
    }

    fn bytes(&self) -> usize {
        StripsRef::bytes(self)
    }

    fn multiply(&self, cpu: Cpu, strips: Range<usize>, x: &[f32], stride: usize, out: &mut [f32]) {
        match cpu {
            // SAFETY: a `HasAvx2` exists only where detection found the instructions.
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx2(_) => unsafe { avx2::sparse(*self, strips, x, stride, out) },
            // SAFETY: a `HasAvx512` or a `HasAmx`, which implies it, exists only where detection found the instructions.
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx512(_) | Cpu::Amx(_) => unsafe { avx512::sparse(*self, strips, x, stride, out) },
            Cpu::Scalar => reference::sparse(*self, strips, x, stride, out),
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

    fn multiply(&self, cpu: Cpu, strips: Range<usize>, x: &[f32], stride: usize, out: &mut [f32]) {
        let block = self.strips(strips);
        match cpu {
            // SAFETY: a `HasAvx2` exists only where detection found the instructions.
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx2(_) => unsafe { avx2::dense(block, x, stride, out) },
            // SAFETY: a `HasAvx512` or a `HasAmx`, which implies it, exists only where detection found the instructions.
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx512(_) | Cpu::Amx(_) => unsafe { avx512::dense(block, x, stride, out) },
            Cpu::Scalar => reference::dense(block, x, stride, out),
        }
    }
}

impl Factor for StripsRef<'_, i8> {
    type Activation = i8;
    type Sum = i32;

    fn rows(&self) -> usize {
        StripsRef::rows(self)
    }

    fn bytes(&self) -> usize {
        StripsRef::bytes(self)
    }

    fn multiply(&self, cpu: Cpu, strips: Range<usize>, x: &[i8], stride: usize, out: &mut [i32]) {
        match cpu {
            // SAFETY: a `HasAvx2` exists only where detection found the instructions.
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx2(_) => unsafe { avx2::sparse_bytes(*self, strips, x, stride, out) },
            // SAFETY: a `HasAvx512` or a `HasAmx`, which implies it, exists only where detection found the instructions.
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx512(_) | Cpu::Amx(_) => unsafe { avx512::sparse_bytes(*self, strips, x, stride, out) },
            Cpu::Scalar => reference::sparse_bytes(*self, strips, x, stride, out),
        }
    }
}

impl Factor for DenseBlock<'_, i8> {
    type Activation = i8;
    type Sum = i32;

    fn rows(&self) -> usize {
        self.rows
    }

    fn bytes(&self) -> usize {
        size_of_val(self.values)
    }

    fn multiply(&self, cpu: Cpu, strips: Range<usize>, x: &[i8], stride: usize, out: &mut [i32]) {
        let block = self.strips(strips);
        match cpu {
            // SAFETY: a `HasAvx2` exists only where detection found the instructions.
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx2(_) => unsafe { avx2::dense_bytes(block, x, stride, out) },
            // SAFETY: a `HasAvx512` or a `HasAmx`, which implies it, exists only where detection found the instructions.
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx512(_) | Cpu::Amx(_) => unsafe { avx512::dense_bytes(block, x, stride, out) },
            Cpu::Scalar => reference::dense_bytes(block, x, stride, out),
        }
    }
}
