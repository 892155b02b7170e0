//! bf16 products on a CPU with AVX512_BF16, for any number of tokens: `vdpbf16ps` multiplies pairs of bf16 values and adds both products to an f32 sum.
//!
//! Weights and activations stay bf16. A pass multiplies up to sixteen tokens, whose sums stay in registers over the whole depth, so that it needs little from
//! memory. More tokens are more passes, which share what is expanded from a 2:4 weight's positions.
//!
//! | module | |
//! |---|---|
//! | `sparse` | the kernel of a 2:4 weight in strips, and a pass of few tokens |
//! | `many` | the same kernel for more tokens than a pass has |
//! | `dense` | the contender |
//!
//! The instruction rounds to nearest even and takes subnormal inputs, products and sums for zero. A product of two bf16 values is exact in f32.

mod dense;
mod many;
mod sparse;

use std::{
    any::TypeId,
    arch::x86_64::{__m512bh, __m512i},
};

use half::bf16;

use super::{
    dense_block::DenseBlock,
    element::KernelElement,
    engine::{Cpu, HasAvx512},
    epilogue::Epilogue,
    strips::StripsRef,
};

/// bf16 values of a 512-bit register.
const LANES: usize = 32;

/// Tokens multiplied in one go: bounds the memory for sums.
const TOKENS: usize = 512;

/// The proof to multiply with. [`super::Engine::Avx512`] includes AVX512_BF16; to compare with f32 arithmetic, force [`super::Engine::Avx2`].
fn choose(cpu: Cpu) -> Option<HasAvx512> {
    match cpu {
        Cpu::Avx512(has) => Some(has),
        Cpu::Amx(has) => Some(has.avx512()),
        Cpu::Avx2(_) | Cpu::Scalar => None,
    }
}

/// `y = act(x · Wᵀ + bias)` for a 2:4 weight, if it is bf16 and the CPU has the instructions; lengths are checked.
pub(super) fn sparse_linear<T: KernelElement>(
    cpu: Cpu,
    weight: StripsRef<'_, T>,
    x: &[T],
    tokens: usize,
    epilogue: Epilogue<'_>,
    y: &mut [T],
) -> Option<()> {
    let weight = sparse::Weight { strips: weight.as_type::<bf16>()?, has: choose(cpu)? };
    for_blocks_of_tokens(x, tokens, y, |x, tokens, y| {
        sparse::product(cpu, weight, bytemuck::cast_slice(x), tokens).store_floats(tokens, epilogue, y);
    });
    Some(())
}

/// `y = act(x · Wᵀ + bias)` for a dense weight, if it is bf16 and the CPU has the instructions; lengths are checked.
pub(super) fn dense_linear<T: KernelElement>(
    cpu: Cpu,
    block: DenseBlock<'_, T>,
    x: &[T],
    tokens: usize,
    epilogue: Epilogue<'_>,
    y: &mut [T],
) -> Option<()> {
    let has = choose(cpu).filter(|_| TypeId::of::<T>() == TypeId::of::<bf16>())?;
    let values: &[bf16] = bytemuck::cast_slice(block.values);
    let weight = dense::Weight { block: DenseBlock { rows: block.rows, cols: block.cols, values }, has };
    for_blocks_of_tokens(x, tokens, y, |x, tokens, y| {
        dense::product(cpu, weight, bytemuck::cast_slice(x), tokens).store_floats(tokens, epilogue, y);
    });
    Some(())
}

/// Calls `f` with [`TOKENS`] tokens at a time: their activations, their number, their outputs.
fn for_blocks_of_tokens<T>(x: &[T], tokens: usize, y: &mut [T], f: impl Fn(&[T], usize, &mut [T])) {
    let (features, outs) = (x.len() / tokens.max(1), y.len() / tokens.max(1));
    for first in (0..tokens).step_by(TOKENS) {
        let end = (first + TOKENS).min(tokens);
        f(&x[first * features..end * features], end - first, &mut y[first * outs..end * outs]);
    }
}

/// A register as pairs of bf16.
#[inline(always)]
fn pairs(register: __m512i) -> __m512bh {
    // SAFETY: both are 512 bits of plain data.
    unsafe { std::mem::transmute(register) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Compressed, MatrixRef,
        kernel::{DenseWeight, Engine, SparseWeight},
    };

    /// Numbers of both signs and of many magnitudes.
    fn values(count: usize) -> Vec<bf16> {
        let value = |i: usize| (i * 37 % 101) as f32 * 2f32.powi((i * 29 % 23) as i32 - 11) - (i % 7) as f32;
        (0..count).map(|i| bf16::from_f32(value(i))).collect()
    }

    /// A pass adds up each sum in the same order, so tokens in one pass, in many and in more than one go have the same bits.
    #[test]
    fn a_token_has_the_same_bits_whatever_tokens_are_beside_it() {
        if !Engine::available().contains(&Engine::Avx512) {
            eprintln!("skipped: this machine has no AVX-512");
            return;
        }
        // Strips that fill the four side by side and more; a last register of columns that is not whole.
        let (out, inn) = (16 * 9 - 3, 70);
        let w = values(out * inn);
        let matrix = MatrixRef::new(out, inn, &w).unwrap();
        let sparse = SparseWeight::pack_for(Compressed::from_pruned(matrix).unwrap(), Engine::Avx512).unwrap();
        let dense = DenseWeight::pack_for(matrix, Engine::Avx512).unwrap();
        let x = values((TOKENS + 3) * inn);
        let product = |x: &[bf16]| {
            let tokens = x.len() / inn;
            let (mut a, mut b) = (vec![bf16::NAN; tokens * out], vec![bf16::NAN; tokens * out]);
            sparse.linear(x, tokens, Epilogue::default(), &mut a).unwrap();
            dense.linear(x, tokens, Epilogue::default(), &mut b).unwrap();
            [a, b]
        };
        let bits = |y: &[bf16]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
        let alone: Vec<_> = x.chunks(inn).map(product).collect();
        for tokens in (1..20).chain([31, 32, 33, 200, TOKENS + 3]) {
            for (i, y) in product(&x[..tokens * inn]).iter().enumerate() {
                for (token, y) in y.chunks(out).enumerate() {
                    assert_eq!(bits(y), bits(&alone[token][i]), "token {token} of {tokens}");
                }
            }
        }
    }
}
