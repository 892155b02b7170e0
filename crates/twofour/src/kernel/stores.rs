//! Products with weights in compressed sparse rows, compressed sparse columns and coordinates.

use super::{Engine, Epilogue, KernelElement, many::Listed};
use crate::{
    Result,
    store::{Coo, Csc, Csr},
};

impl<T: KernelElement> Csr<T> {
    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, cols]`, `y` is `[tokens, rows]`. Products accumulate in f32.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit; those of [`Engine::best`].
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        let weight = Listed::of_csr(self.rows(), self.cols(), self.starts(), self.columns(), self.values());
        weight.linear(Engine::best()?, x, tokens, epilogue, y)
    }
}

impl<T: KernelElement> Csc<T> {
    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, cols]`, `y` is `[tokens, rows]`. Products accumulate in f32. Every
    /// call lists the weight by rows first: where it is multiplied often, convert it to [`Csr`].
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit; those of [`Engine::best`].
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        Csr::from(self).linear(x, tokens, epilogue, y)
    }
}

impl<T: KernelElement> Coo<T> {
    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, cols]`, `y` is `[tokens, rows]`. Products accumulate in f32.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit; those of [`Engine::best`].
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        let starts = self.starts();
        let weight = Listed::of_csr(self.rows(), self.cols(), &starts, self.columns(), self.values());
        weight.linear(Engine::best()?, x, tokens, epilogue, y)
    }
}
