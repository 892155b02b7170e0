//! A dense weight where it lies, and the dense kernels.

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::{
    amx, bf16,
    prefill::{Many, Prefill},
};
use super::{
    arguments::{expect_bias, expect_len, widen},
    decode,
    dense_block::DenseBlock,
    element::KernelElement,
    engine::{Cpu, Engine},
    epilogue::Epilogue,
    reference,
};
use crate::{MatrixRef, Result};

/// A dense weight `[out_features, in_features]` that somebody else holds, for instance one that is being trained.
///
/// ```
/// use twofour::{MatrixRef, kernel::{DenseRef, Engine, Epilogue}};
/// let weight = DenseRef::new(MatrixRef::new(1, 2, &[3.0f32, 4.0])?, Engine::best()?)?;
/// let mut y = [0.0];
/// weight.linear(&[1.0, 10.0], 1, Epilogue::default(), &mut y)?;
/// assert_eq!(y, [43.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct DenseRef<'a, T> {
    block: DenseBlock<'a, T>,
    cpu: Cpu,
}

impl<'a, T: KernelElement> DenseRef<'a, T> {
    /// For one engine.
    ///
    /// # Errors
    /// [`crate::Error::Engine`] where this machine cannot run it.
    pub fn new(matrix: MatrixRef<'a, T>, engine: Engine) -> Result<Self> {
        let cpu = Cpu::detect(engine)?;
        Ok(Self::of(DenseBlock { rows: matrix.rows(), cols: matrix.cols(), values: matrix.data() }, cpu))
    }

    /// For an engine that was detected.
    pub(super) fn of(block: DenseBlock<'a, T>, cpu: Cpu) -> Self {
        DenseRef { block, cpu }
    }

    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Products accumulate in f32.
    ///
    /// bf16 from [`Engine::Avx512`] on is multiplied by instructions that take subnormal factors, products and sums (magnitudes below 2^-126) for zero.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        expect_len("x", x, tokens, self.block.cols)?;
        expect_len("y", y, tokens, self.block.rows)?;
        expect_bias(&epilogue, self.block.rows)?;
        #[cfg(target_arch = "x86_64")]
        if let Some(sums) = amx::dense_floats(self.cpu, self.block, x, tokens) {
            sums.store_floats(tokens, epilogue, y);
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(()) = bf16::dense_linear(self.cpu, self.block, x, tokens, epilogue, y) {
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(prefill) = Prefill::choose(self.cpu, tokens, Many::DENSE) {
            prefill.dense_linear(self.block, x, epilogue, y);
            return Ok(());
        }
        decode::product(self.cpu, self.block, &widen(x), tokens).store_floats(tokens, epilogue, y);
        Ok(())
    }

    /// `dx = dy · W`: `dy` is `[tokens, out_features]`, `dx` is `[tokens, in_features]` and is overwritten.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `dy` or `dx` does not fit.
    pub fn input_gradient(&self, dy: &[T], tokens: usize, dx: &mut [T]) -> Result<()> {
        expect_len("dy", dy, tokens, self.block.rows)?;
        expect_len("dx", dx, tokens, self.block.cols)?;
        if dx.is_empty() {
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(prefill) = Prefill::choose(self.cpu, tokens, Many::GRADIENT) {
            prefill.dense_input_gradient(self.block, dy, dx);
            return Ok(());
        }
        let dy = widen(dy);
        dx.par_chunks_mut(self.block.cols).enumerate().for_each(|(token, dx)| {
            let mut sums = vec![0f32; dx.len()];
            reference::dense_input_gradient(self.block, &dy[token * self.block.rows..][..self.block.rows], &mut sums);
            for (dx, sum) in dx.iter_mut().zip(sums) {
                *dx = T::from_f32(sum);
            }
        });
        Ok(())
    }
}
