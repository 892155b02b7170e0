//! Where solvers compute: on the CPU, or on a device that keeps matrices in memory of its own between operations.

mod cpu;

use std::{any::Any, fmt, ops::Range};

pub use cpu::Cpu;

use crate::{Error, Mask, MatrixRef, Pattern, Result, calibration::Hessian};

/// Values in a backend's memory: f32, or the elements that a mask keeps.
pub struct Values(Box<dyn Any + Send + Sync>);

impl fmt::Debug for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Values").finish_non_exhaustive()
    }
}

impl Values {
    /// Values in memory of that type, which is their backend's own.
    pub fn new<T: Any + Send + Sync>(memory: T) -> Self {
        Values(Box::new(memory))
    }

    /// The memory.
    ///
    /// # Errors
    /// [`Error::OtherBackend`] for memory of another type.
    pub fn memory<T: Any>(&self) -> Result<&T> {
        self.0.downcast_ref().ok_or(Error::OtherBackend)
    }

    /// The memory, to be changed.
    ///
    /// # Errors
    /// [`Error::OtherBackend`] for memory of another type.
    pub fn memory_mut<T: Any>(&mut self) -> Result<&mut T> {
        self.0.downcast_mut().ok_or(Error::OtherBackend)
    }

    /// The memory itself.
    ///
    /// # Errors
    /// [`Error::OtherBackend`] for memory of another type.
    pub fn into_memory<T: Any>(self) -> Result<T> {
        self.0.downcast().map(|memory| *memory).map_err(|_| Error::OtherBackend)
    }
}

/// What [`alps`](super::alps()) iterates on, `[rows, cols]` each, in its notation.
#[derive(Debug)]
pub struct AlpsState {
    /// `W · H`.
    pub outputs: Values,
    /// `B`.
    pub fit: Values,
    /// `D`.
    pub sparse: Values,
    /// `V`.
    pub multiplier: Values,
}

/// Rows that [`refit`](super::refit()) takes steps with.
#[derive(Debug)]
pub struct RefitRows {
    /// Columns of a row.
    pub cols: usize,
    /// What is kept of the rows.
    pub mask: Values,
    /// `1 / H_jj`, `[cols]`.
    pub inverse: Values,
    /// The kept weights.
    pub weight: Values,
    /// `(w - ŵ) · H` within the mask.
    pub residual: Values,
    /// The direction of the next step.
    pub direction: Values,
    /// The direction times the Hessian.
    pub product: Values,
    /// Of each row `r · z` with the preconditioned residual `z`: see [`Backend::row_sums`].
    pub norms: Values,
}

/// A place to compute, with the operations that take a solver's time. All matrices are row-major; a weight has rows of
/// `cols` elements.
///
/// Operations may return before they are done; those that return numbers to the caller wait. Two backends may round
/// sums differently, so that masks differ where elements are nearly equal.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Moves values to the backend.
    ///
    /// # Errors
    /// [`Error::Backend`] where its memory does not suffice.
    fn upload(&self, values: Vec<f32>) -> Result<Values>;

    /// Moves values back.
    ///
    /// # Errors
    /// [`Error::OtherBackend`], [`Error::Backend`].
    fn download(&self, values: Values) -> Result<Vec<f32>>;

    /// A copy of values.
    ///
    /// # Errors
    /// Those of [`Backend::upload`] and [`Backend::download`].
    fn copy(&self, values: &Values) -> Result<Values>;

    /// So many zeros.
    ///
    /// # Errors
    /// Those of [`Backend::upload`].
    fn zeros(&self, len: usize) -> Result<Values>;

    /// Room for an f64 for each row.
    ///
    /// # Errors
    /// Those of [`Backend::upload`].
    fn row_sums(&self, rows: usize) -> Result<Values>;

    /// Moves the mask of some rows to the backend.
    ///
    /// # Errors
    /// Those of [`Backend::upload`].
    fn upload_mask(&self, mask: &Mask, rows: Range<usize>) -> Result<Values>;

    /// The mask `[rows, cols]` that values are.
    ///
    /// # Errors
    /// Those of [`Backend::download`].
    fn download_mask(&self, mask: &Values, rows: usize, cols: usize) -> Result<Mask>;

    /// Computes `out = x · square` for rows `x: [rows, order]` and a symmetric matrix `[order, order]`.
    ///
    /// # Errors
    /// [`Error::OtherBackend`], [`Error::Backend`].
    fn product(&self, x: &Values, square: &Values, order: usize, out: &mut Values) -> Result<()>;

    /// Returns the inverse of the symmetric matrix `square + shift · I`, `[order, order]`, or a row whose pivot is not
    /// positive.
    ///
    /// # Errors
    /// Those of [`Backend::product`].
    fn inverse(&self, square: &Values, order: usize, shift: f32) -> Result<std::result::Result<Values, usize>>;

    /// Returns the mask of the largest squares of each group of `fit`, or of `fit + factor · added`; ties go to the
    /// lower index.
    ///
    /// # Errors
    /// Those of [`Backend::product`].
    fn largest(&self, pattern: Pattern, cols: usize, fit: &Values, added: Option<(f32, &Values)>) -> Result<Values>;

    /// Returns in how many elements two masks differ.
    ///
    /// # Errors
    /// Those of [`Backend::product`].
    fn differences(&self, a: &Values, b: &Values) -> Result<u64>;

    /// Sets to zero what a mask prunes.
    ///
    /// # Errors
    /// Those of [`Backend::product`].
    fn apply(&self, mask: &Values, cols: usize, values: &mut Values) -> Result<()>;

    /// Computes `D ← W H - V + penalty · D - shift · B`: the right side of the next fit, in the place of `D`.
    ///
    /// # Errors
    /// Those of [`Backend::product`].
    fn alps_right(&self, state: &mut AlpsState, cols: usize, penalty: f32, shift: f32) -> Result<()>;

    /// Computes `D = B + V / penalty` within a mask, zero outside, and `V ← V + penalty · (B - D)`.
    ///
    /// # Errors
    /// Those of [`Backend::product`].
    fn alps_project(&self, state: &mut AlpsState, cols: usize, mask: &Values, penalty: f32) -> Result<()>;

    /// Computes each row's first direction: its preconditioned residual, within the mask.
    ///
    /// # Errors
    /// Those of [`Backend::product`].
    fn refit_begin(&self, rows: &mut RefitRows) -> Result<()>;

    /// Takes each row's step along its direction, whose product with the Hessian is there, and computes the next
    /// direction. A row stays where nothing is left to gain.
    ///
    /// # Errors
    /// Those of [`Backend::product`].
    fn refit_step(&self, rows: &mut RefitRows) -> Result<()>;

    /// Returns [`Hessian::squared_outputs`] of a weight.
    ///
    /// # Errors
    /// Those of [`Hessian::squared_outputs`] and of [`Backend::product`].
    fn squared_outputs(&self, hessian: &Hessian, weight: MatrixRef<'_, f32>) -> Result<f64>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_another_backend_are_an_error() {
        let mut values = Values::new(vec![1u8]);
        assert!(matches!(values.memory::<Vec<f32>>(), Err(Error::OtherBackend)));
        assert!(matches!(values.memory_mut::<Vec<f32>>(), Err(Error::OtherBackend)));
        assert!(matches!(Cpu.copy(&values), Err(Error::OtherBackend)));
        assert!(matches!(Cpu.download(values), Err(Error::OtherBackend)));
    }
}
