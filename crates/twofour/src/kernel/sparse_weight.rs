//! A compressed weight, ready to multiply.

use super::{
    borrowed::{SparseWeightMut, SparseWeightRef},
    element::KernelElement,
    engine::{Cpu, Engine},
    epilogue::Epilogue,
    strips::Strips,
};
use crate::{Compressed, Mask, MatrixRef, Result};

/// A 2:4 weight `[out_features, in_features]` in the layout of the kernels: strips of sixteen rows.
///
/// ```
/// use twofour::{Compressed, MatrixRef, kernel::{Epilogue, SparseWeight}};
/// let w = [0.0f32, 2.0, 0.0, 3.0, 1.0, 0.0, 0.0, 0.0];
/// let w = SparseWeight::pack(Compressed::from_dense(MatrixRef::new(2, 4, &w)?)?)?;
/// let mut y = [0.0; 2];
/// w.linear(&[1.0, 10.0, 100.0, 1000.0], 1, Epilogue::default(), &mut y)?;
/// assert_eq!(y, [3020.0, 1.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SparseWeight<T> {
    weight: Strips<T>,
    cpu: Cpu,
}

impl<T: KernelElement> SparseWeight<T> {
    /// Packs for [`Engine::best`].
    ///
    /// # Errors
    /// Those of [`Engine::best`].
    pub fn pack(weight: Compressed<T>) -> Result<Self> {
        Self::pack_for(weight, Engine::best()?)
    }

    /// Packs for one engine.
    ///
    /// # Errors
    /// [`crate::Error::Engine`] where this machine cannot run it.
    pub fn pack_for(weight: Compressed<T>, engine: Engine) -> Result<Self> {
        Ok(Self { weight: Strips::pack(&weight)?, cpu: Cpu::detect(engine)? })
    }

    /// Compresses a matrix of the same shape into this weight's memory, keeping what the mask keeps: what sparse training
    /// does after every step.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where a shape differs, [`crate::Error::TooManyKept`] where the mask is not 2:4 along rows; the
    /// weight's contents are then unspecified.
    pub fn repack(&mut self, matrix: MatrixRef<'_, T>, mask: &Mask) -> Result<()> {
        self.weight.repack(matrix, mask)
    }

    /// The engine that multiplies.
    pub fn engine(&self) -> Engine {
        self.cpu.engine()
    }

    /// Rows of the weight.
    pub fn out_features(&self) -> usize {
        self.weight.rows()
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.weight.cols()
    }

    /// Bytes of values and metadata.
    pub fn bytes(&self) -> usize {
        self.weight.bytes()
    }

    /// The weight in canonical form, made anew.
    pub fn to_compressed(&self) -> Compressed<T> {
        self.weight.to_compressed()
    }

    /// The weight, borrowed.
    pub fn view(&self) -> SparseWeightRef<'_, T> {
        SparseWeightRef::of(self.weight.view(), self.cpu)
    }

    /// The weight's memory, to be filled.
    pub(crate) fn view_mut(&mut self) -> SparseWeightMut<'_, T> {
        SparseWeightMut::of(self.weight.view_mut())
    }

    /// [`SparseWeightRef::linear`].
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        self.view().linear(x, tokens, epilogue, y)
    }

    /// [`SparseWeightRef::input_gradient`].
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `dy` or `dx` does not fit.
    pub fn input_gradient(&self, dy: &[T], tokens: usize, dx: &mut [T]) -> Result<()> {
        self.view().input_gradient(dy, tokens, dx)
    }
}
