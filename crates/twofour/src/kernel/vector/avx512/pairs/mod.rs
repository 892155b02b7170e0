//! bf16 products in AVX512_BF16, for any number of tokens: `vdpbf16ps` multiplies pairs of bf16 values and adds both
//! products to an f32 sum.
//!
//! Weights and activations stay bf16. A pass multiplies up to sixteen tokens, whose sums stay in registers over the
//! whole depth, so that it needs little from memory. More tokens are more passes, which share what is expanded from a
//! 2:4 weight's positions.
//!
//! | module | |
//! |---|---|
//! | `sparse` | the loop of a 2:4 weight in strips, and a pass of few tokens |
//! | `many` | the same loop for more tokens than a pass has |
//! | `dense` | a dense weight |
//!
//! The instruction rounds to nearest even and takes subnormal inputs, products and sums for zero. A product of two bf16
//! values is exact in f32.

mod dense;
mod many;
mod sparse;

use std::arch::x86_64::{__m512bh, __m512i};

use super::Avx512;
use crate::kernel::{format::PairProducts, vector::Has};

/// bf16 values of a 512-bit register.
const LANES: usize = 32;

/// The products of [`Avx512`].
pub(super) const PRODUCTS: PairProducts = PairProducts {
    sparse: |weight, x, tokens| {
        // SAFETY: these functions may be called only on a CPU that has the instructions.
        sparse::product(unsafe { Has::<Avx512>::new() }, weight, x, tokens)
    },
    dense: |weight, x, tokens| {
        // SAFETY: these functions may be called only on a CPU that has the instructions.
        dense::product(unsafe { Has::<Avx512>::new() }, weight, x, tokens)
    },
};

/// A register as pairs of bf16.
#[inline(always)]
fn pairs(register: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits of plain data.
    unsafe { std::mem::transmute(register) }
}
