//! bfloat16. A line is a pair for each row: a factor of instructions that multiply pairs of bf16, and elsewhere a shift
//! makes f32 of the first value and a mask of the second.

use half::bf16;

use super::{
    DenseFormat, Format, KernelElement, Tokens, Weight,
    floats::{self, float_format},
};
use crate::kernel::{
    dense::Rows,
    engine::Cpu,
    strips::{ROWS, Strip},
    tile,
    vector::Vector,
};

float_format!(bf16, |row, which| 2 * row + which);

/// Tokens multiplied in one go: bounds the memory for sums.
const TOKENS: usize = 512;

impl KernelElement for bf16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const bf16) -> V::Floats {
        // SAFETY: the conditions are the same.
        unsafe { V::load_bf16(p) }
    }

    #[inline(always)]
    unsafe fn load_line<V: Vector>(line: *const bf16, part: usize) -> [V::Floats; 2] {
        // SAFETY: a line has ROWS pairs, of which a part has LANES.
        unsafe { V::load_pairs(line.add(2 * part * V::LANES)) }
    }

    /// By tiles, or by instructions that multiply pairs of bf16.
    fn own_linear(cpu: Cpu, weight: Weight<'_, bf16>, tokens: Tokens<'_, bf16>, y: &mut [bf16]) -> bool {
        if let Some(sums) = tile::floats(cpu, weight, tokens.x, tokens.count) {
            sums.store_floats(tokens.count, tokens.epilogue, y);
            return true;
        }
        let Some(products) = cpu.pairs() else { return false };
        for_blocks_of_tokens(tokens, y, |x, count, y| {
            // SAFETY: these are the products of this CPU's instructions.
            let sums = unsafe {
                match weight {
                    Weight::Sparse(weight) => (products.sparse)(weight, x, count),
                    Weight::Dense(weight) => (products.dense)(weight, x, count),
                }
            };
            sums.store_floats(count, tokens.epilogue, y);
        });
        true
    }
}

/// Calls `f` with [`TOKENS`] tokens at a time: their activations, their number, their outputs.
fn for_blocks_of_tokens(tokens: Tokens<'_, bf16>, y: &mut [bf16], f: impl Fn(&[bf16], usize, &mut [bf16])) {
    let (features, outs) = (tokens.x.len() / tokens.count.max(1), y.len() / tokens.count.max(1));
    for first in (0..tokens.count).step_by(TOKENS) {
        let end = (first + TOKENS).min(tokens.count);
        f(&tokens.x[first * features..end * features], end - first, &mut y[first * outs..end * outs]);
    }
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Compressed, MatrixRef,
        kernel::{DenseWeight, Engine, Epilogue, SparseWeight},
    };

    /// Numbers of both signs and of many magnitudes.
    fn values(count: usize) -> Vec<bf16> {
        let value = |i: usize| (i * 37 % 101) as f32 * 2f32.powi((i * 29 % 23) as i32 - 11) - (i % 7) as f32;
        (0..count).map(|i| bf16::from_f32(value(i))).collect()
    }

    /// A pass adds up each sum in the same order, so tokens in one pass, in many and in more than one go have the same
    /// bits.
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
