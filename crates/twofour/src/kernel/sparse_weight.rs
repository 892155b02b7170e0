//! A compressed weight, ready to multiply.

use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use super::{
    amx,
    prefill::{Many, Prefill},
};
use super::{
    arguments::{expect_bias, expect_len, widen},
    decode,
    element::KernelElement,
    engine::{Cpu, Engine},
    epilogue::Epilogue,
    reference,
    remask::Selection,
    strips::Strips,
};
use crate::{Compressed, Element, Mask, MatrixRef, Result};

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
        Ok(Self { weight: Strips::pack(&weight), cpu: Cpu::detect(engine)? })
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

    /// Chooses the mask of a matrix of the same shape, writes it to `mask`, packs what it keeps into this weight's memory, and
    /// returns how many mask elements changed: one pass.
    ///
    /// # Errors
    /// Those of [`Strips::remask`].
    pub(crate) fn remask<M: Element>(
        &mut self,
        matrix: MatrixRef<'_, M>,
        selection: Selection,
        mask: &mut Mask,
    ) -> Result<u64> {
        self.weight.remask(matrix, selection, mask)
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

    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Products accumulate in f32.
    ///
    /// A pruned weight takes no part in any sum, so an infinity or a NaN that meets one leaves no trace.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        expect_len("x", x, tokens, self.in_features())?;
        expect_len("y", y, tokens, self.out_features())?;
        expect_bias(&epilogue, self.out_features())?;
        #[cfg(target_arch = "x86_64")]
        if let Some(sums) = amx::sparse_floats(self.cpu, &self.weight, x, tokens) {
            sums.store_floats(tokens, epilogue, y);
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(prefill) = Prefill::choose(self.cpu, tokens, Many::SPARSE) {
            prefill.sparse_linear(&self.weight, x, epilogue, y);
            return Ok(());
        }
        let x = decode::prepare(x, self.in_features(), self.weight.padded_cols());
        decode::product(self.cpu, &self.weight, &x, tokens).store_floats(tokens, epilogue, y);
        Ok(())
    }

    /// `dx = dy · W`: `dy` is `[tokens, out_features]`, `dx` is `[tokens, in_features]` and is overwritten.
    /// Products accumulate in f32.
    ///
    /// A pruned weight takes no part in any sum, so an infinite or NaN gradient that meets one leaves no trace.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `dy` or `dx` does not fit.
    pub fn input_gradient(&self, dy: &[T], tokens: usize, dx: &mut [T]) -> Result<()> {
        expect_len("dy", dy, tokens, self.out_features())?;
        expect_len("dx", dx, tokens, self.in_features())?;
        if dx.is_empty() {
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(prefill) = Prefill::choose(self.cpu, tokens, Many::GRADIENT) {
            prefill.sparse_input_gradient(&self.weight, dy, dx);
            return Ok(());
        }
        let dy = widen(dy);
        dx.par_chunks_mut(self.in_features()).enumerate().for_each(|(token, dx)| {
            let mut sums = vec![0f32; dx.len()];
            reference::sparse_input_gradient(
                &self.weight,
                &dy[token * self.out_features()..][..self.out_features()],
                &mut sums,
            );
            for (dx, sum) in dx.iter_mut().zip(sums) {
                *dx = T::from_f32(sum);
            }
        });
        Ok(())
    }
}
