//! A dense weight with kernels of the same care: the contender that a sparse weight must beat.

use rayon::prelude::*;

use super::{
    Engine, Epilogue, KernelElement,
    aligned::Aligned,
    arguments::{expect_bias, expect_len, widen},
    decode::{self, DenseBlock},
    reference,
};
#[cfg(target_arch = "x86_64")]
use super::{
    amx,
    prefill::{Many, Prefill},
};
use crate::{MatrixRef, Result};

/// A dense weight `[out_features, in_features]`.
#[derive(Debug, Clone)]
pub struct DenseWeight<T> {
    rows: usize,
    cols: usize,
    values: Aligned<T>,
    engine: Engine,
}

impl<T: KernelElement> DenseWeight<T> {
    /// Packs for [`Engine::best`].
    ///
    /// # Errors
    /// Those of [`Engine::best`].
    pub fn pack(matrix: MatrixRef<'_, T>) -> Result<Self> {
        Self::pack_for(matrix, Engine::best()?)
    }

    /// Packs for one engine.
    ///
    /// # Errors
    /// [`crate::Error::Engine`] where this machine cannot run it.
    pub fn pack_for(matrix: MatrixRef<'_, T>, engine: Engine) -> Result<Self> {
        let engine = engine.expect_available()?;
        Ok(Self { rows: matrix.rows(), cols: matrix.cols(), values: Aligned::copy_of(matrix.data()), engine })
    }

    /// Rows of the weight.
    pub fn out_features(&self) -> usize {
        self.rows
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.cols
    }

    /// Bytes of the values.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.values)
    }

    /// The weight's values, `[out_features, in_features]`.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Products accumulate in f32.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        expect_len("x", x, tokens, self.cols)?;
        expect_len("y", y, tokens, self.rows)?;
        expect_bias(&epilogue, self.rows)?;
        #[cfg(target_arch = "x86_64")]
        if let Some(tiles) = amx::choose(self.engine, x, tokens) {
            (tiles.dense)(self.block(), x, tokens).store_floats(tokens, epilogue, y);
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(prefill) = Prefill::choose(self.engine, tokens, Many::DENSE) {
            prefill.dense_linear(self.block(), x, epilogue, y);
            return Ok(());
        }
        decode::product(self.engine, self.block(), &widen(x), tokens).store_floats(tokens, epilogue, y);
        Ok(())
    }

    /// `dx = dy · W`: `dy` is `[tokens, out_features]`, `dx` is `[tokens, in_features]` and is overwritten.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `dy` or `dx` does not fit.
    pub fn input_gradient(&self, dy: &[T], tokens: usize, dx: &mut [T]) -> Result<()> {
        expect_len("dy", dy, tokens, self.rows)?;
        expect_len("dx", dx, tokens, self.cols)?;
        if dx.is_empty() {
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(prefill) = Prefill::choose(self.engine, tokens, Many::GRADIENT) {
            prefill.dense_input_gradient(self.block(), dy, dx);
            return Ok(());
        }
        let dy = widen(dy);
        dx.par_chunks_mut(self.cols).enumerate().for_each(|(token, dx)| {
            let mut sums = vec![0f32; dx.len()];
            reference::dense_input_gradient(self.block(), &dy[token * self.rows..][..self.rows], &mut sums);
            for (dx, sum) in dx.iter_mut().zip(sums) {
                *dx = T::from_f32(sum);
            }
        });
        Ok(())
    }

    pub(super) fn block(&self) -> DenseBlock<'_, T> {
        DenseBlock { rows: self.rows, values: &self.values, cols: self.cols }
    }
}
