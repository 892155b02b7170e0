//! A dense weight, whose loops are written with the same care: the baseline that a sparse weight is compared with.

use std::ops::{Deref, Range};

use rayon::prelude::*;

use super::{
    aligned::Aligned,
    arguments::{expect_bias, expect_len, widened},
    engine::Cpu,
    epilogue::Epilogue,
    few,
    format::{DenseFormat, KernelElement, Tokens, Weight},
    many::{self, Factor},
    strips::ROWS,
};
use crate::{Element, MatrixRef, Result, kernel::Engine};

/// Rows of a dense weight where it lies.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a, T> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// `[rows, cols]`.
    pub(super) values: &'a [T],
}

impl<'a, T: Element> Rows<'a, T> {
    pub(super) fn of(matrix: MatrixRef<'a, T>) -> Self {
        Self { rows: matrix.rows(), cols: matrix.cols(), values: matrix.data() }
    }
}

impl<T> Rows<'_, T> {
    /// The rows of some strips.
    pub(super) fn strips(&self, strips: Range<usize>) -> Self {
        let rows = strips.start * ROWS..(strips.end * ROWS).min(self.rows);
        Rows { rows: rows.len(), values: &self.values[rows.start * self.cols..rows.end * self.cols], ..*self }
    }
}

/// A dense weight `[out_features, in_features]` of format `T`, for one [`Engine`]. `B` is its memory: of its own
/// ([`DenseWeight`]), or that of somebody else ([`DenseRef`]).
///
/// ```
/// use twofour::{MatrixRef, kernel::{DenseRef, Engine, Epilogue}};
/// let weight = DenseRef::new(MatrixRef::new(1, 2, &[3.0f32, 4.0])?, Engine::best()?)?;
/// let mut y = [0.0];
/// weight.linear(&[1.0, 10.0], 1, Epilogue::default(), &mut y)?;
/// assert_eq!(y, [43.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug)]
pub struct Dense<'a, T: DenseFormat<Stored = T>, B = Aligned<T>> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) values: B,
    pub(super) beside: T::Beside<'a>,
    pub(super) cpu: Cpu,
}

/// A dense weight in memory of its own.
pub type DenseWeight<T> = Dense<'static, T>;

/// A dense weight that somebody else holds, for instance one that is being trained.
pub type DenseRef<'a, T> = Dense<'a, T, &'a [T]>;

impl<T: DenseFormat<Stored = T>, B: Clone> Clone for Dense<'_, T, B> {
    fn clone(&self) -> Self {
        let Self { rows, cols, .. } = *self;
        Dense { rows, cols, values: self.values.clone(), beside: self.beside.clone(), cpu: self.cpu }
    }
}

impl<T: DenseFormat<Stored = T>, B: Deref<Target = [T]>> Dense<'_, T, B> {
    /// Rows of the weight.
    pub fn out_features(&self) -> usize {
        self.rows
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.cols
    }

    /// Bytes of the values and of scales.
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.values) + T::bytes_beside(&self.beside)
    }

    /// The weight's values, `[out_features, in_features]`.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    pub(super) fn rows(&self) -> Rows<'_, T> {
        Rows { rows: self.rows, cols: self.cols, values: &self.values }
    }
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
        let (values, cpu) = (Aligned::copy_of(matrix.data())?, Cpu::detect(engine)?);
        Ok(Dense { rows: matrix.rows(), cols: matrix.cols(), values, beside: (), cpu })
    }
}

impl<'a, T: KernelElement> DenseRef<'a, T> {
    /// For one engine.
    ///
    /// # Errors
    /// [`crate::Error::Engine`] where this machine cannot run it.
    pub fn new(matrix: MatrixRef<'a, T>, engine: Engine) -> Result<Self> {
        let cpu = Cpu::detect(engine)?;
        Ok(Dense { rows: matrix.rows(), cols: matrix.cols(), values: matrix.data(), beside: (), cpu })
    }
}

impl<T: KernelElement, B: Deref<Target = [T]>> Dense<'_, T, B> {
    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Products accumulate
    /// in f32.
    ///
    /// bf16 from [`Engine::Avx512`] on is multiplied by instructions that take subnormal factors, products and sums
    /// (magnitudes below 2^-126) for zero.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        expect_len("x", x, tokens, self.cols)?;
        expect_len("y", y, tokens, self.rows)?;
        expect_bias(&epilogue, self.rows)?;
        let (weight, cpu) = (self.rows(), self.cpu);
        if T::own_linear(cpu, Weight::Dense(weight), Tokens { x, count: tokens, epilogue }, y) {
            return Ok(());
        }
        if tokens >= cpu.many().dense {
            many::product(cpu, Factor::Rows(weight), x, epilogue, y);
            return Ok(());
        }
        few::rows::multiply::<T>(cpu, weight, &widened(x), tokens).store_floats(tokens, epilogue, y);
        Ok(())
    }

    /// `dx = dy · W`: `dy` is `[tokens, out_features]`, `dx` is `[tokens, in_features]` and is overwritten.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `dy` or `dx` does not fit.
    pub fn input_gradient(&self, dy: &[T], tokens: usize, dx: &mut [T]) -> Result<()> {
        let (rows, cols) = (self.rows, self.cols);
        expect_len("dy", dy, tokens, rows)?;
        expect_len("dx", dx, tokens, cols)?;
        if dx.is_empty() {
            return Ok(());
        }
        if tokens >= self.cpu.many().gradient {
            many::product(self.cpu, Factor::Columns(self.rows()), dy, Epilogue::default(), dx);
            return Ok(());
        }
        let (values, dy) = (self.values(), widened(dy));
        dx.par_chunks_mut(cols).enumerate().for_each(|(token, dx)| {
            let mut sums = vec![0f32; cols];
            // Added up in order of row.
            for (dy, row) in dy[token * rows..][..rows].iter().zip(values.chunks_exact(cols)) {
                sums.iter_mut().zip(row).for_each(|(slot, w)| *slot += w.to_f32() * dy);
            }
            dx.iter_mut().zip(sums).for_each(|(dx, sum)| *dx = T::from_f32(sum));
        });
        Ok(())
    }
}
