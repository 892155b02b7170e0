//! A dense weight with kernels of the same care: the contender that a sparse weight must beat.

use super::{
    aligned::Aligned,
    dense_block::DenseBlock,
    dense_ref::DenseRef,
    element::KernelElement,
    engine::{Cpu, Engine},
    epilogue::Epilogue,
};
use crate::{MatrixRef, Result};

/// A dense weight `[out_features, in_features]`.
#[derive(Debug, Clone)]
pub struct DenseWeight<T> {
    rows: usize,
    cols: usize,
    values: Aligned<T>,
    cpu: Cpu,
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
        let cpu = Cpu::detect(engine)?;
        Ok(Self { rows: matrix.rows(), cols: matrix.cols(), values: Aligned::copy_of(matrix.data())?, cpu })
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

    /// The weight where it lies.
    pub fn view(&self) -> DenseRef<'_, T> {
        DenseRef::of(DenseBlock { rows: self.rows, cols: self.cols, values: &self.values }, self.cpu)
    }

    /// See [`DenseRef::linear`].
    ///
    /// # Errors
    /// As there.
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        self.view().linear(x, tokens, epilogue, y)
    }

    /// See [`DenseRef::input_gradient`].
    ///
    /// # Errors
    /// As there.
    pub fn input_gradient(&self, dy: &[T], tokens: usize, dx: &mut [T]) -> Result<()> {
        self.view().input_gradient(dy, tokens, dx)
    }
}
