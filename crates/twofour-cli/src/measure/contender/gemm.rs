//! The `gemm` crate, called directly. Its GEMV for one token runs on one thread, so the outputs are divided among
//! threads here.

use std::{any::TypeId, rc::Rc};

use anyhow::Result;
use half::f16;
use twofour::kernel::{DenseWeight, KernelElement, share};

use super::Contender;
use crate::measure::{memory::Rotation, work::Who};

#[derive(Debug)]
pub(super) struct Gemm<T: KernelElement> {
    weights: Rc<Rotation<DenseWeight<T>>>,
    x: Rc<Vec<T>>,
    tokens: usize,
    y: Vec<T>,
}

impl<T: KernelElement> Gemm<T> {
    /// Returns nothing for a dtype that `gemm` does not support.
    pub(super) fn new(weights: Rc<Rotation<DenseWeight<T>>>, x: Rc<Vec<T>>, tokens: usize) -> Option<Self> {
        let known = [TypeId::of::<f32>(), TypeId::of::<f16>()];
        let out = weights.next().out_features();
        known.contains(&TypeId::of::<T>()).then(|| Gemm { weights, x, tokens, y: vec![T::ZERO; tokens * out] })
    }
}

impl<T: KernelElement> Contender for Gemm<T> {
    fn who(&self) -> Who {
        Who::Gemm
    }

    fn weight_bytes(&self) -> usize {
        self.weights.next().bytes()
    }

    fn multiply(&mut self) -> Result<()> {
        let weight = self.weights.next();
        let (inputs, threads) = (weight.in_features(), rayon::current_num_threads());
        if self.tokens == 1 {
            let rows = weight.out_features().div_ceil(threads);
            let x = self.x.as_slice();
            let parts = self.y.chunks_mut(rows).zip(weight.values().chunks(rows * inputs));
            share(parts, || (), |(), (y, weight)| product(x, 1, weight, inputs, y, gemm::Parallelism::None));
        } else {
            let threads = match threads {
                1 => gemm::Parallelism::None,
                many => gemm::Parallelism::Rayon(many),
            };
            product(&self.x, self.tokens, weight.values(), inputs, &mut self.y, threads);
        }
        Ok(())
    }

    fn product(&self) -> Result<Vec<f32>> {
        Ok(self.y.iter().map(|y| y.to_f32()).collect())
    }
}

/// `y = x · Wᵀ`, all row-major: `x` is `[tokens, inputs]`, the weight `[out, inputs]`, `y` `[tokens, out]`.
fn product<T: KernelElement>(
    x: &[T],
    tokens: usize,
    weight: &[T],
    inputs: usize,
    y: &mut [T],
    threads: gemm::Parallelism,
) {
    let out = weight.len() / inputs;
    assert!(x.len() == tokens * inputs && weight.len() == out * inputs && y.len() == tokens * out);
    let [row, of_y] = [inputs, out].map(|stride| stride as isize);
    let (zero, one) = (T::ZERO, T::from_f32(1.0));
    // SAFETY: with these strides, `gemm` reads tokens x inputs elements at `x` and inputs x out at `weight`, and writes
    // tokens x out at `y`: exactly the slices, as the assertion makes sure. `T` is one of the types that it supports
    // (`Gemm::new`); `y` is not read.
    unsafe {
        gemm::gemm(
            tokens,
            out,
            inputs,
            y.as_mut_ptr(),
            1,
            of_y,
            false,
            x.as_ptr(),
            1,
            row,
            weight.as_ptr(),
            row,
            1,
            zero,
            one,
            false,
            false,
            false,
            threads,
        );
    }
}
