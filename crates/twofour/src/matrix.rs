//! A borrowed dense matrix.

use rayon::prelude::*;

use crate::{Element, Error, Result, first_error::first_error, widest::widest};

/// A dense row-major matrix, `[rows, cols]`, that somebody else owns.
///
/// Zero rows or columns are allowed everywhere.
#[derive(Debug, Clone, Copy)]
pub struct MatrixRef<'a, T> {
    rows: usize,
    cols: usize,
    data: &'a [T],
}

impl<'a, T: Element> MatrixRef<'a, T> {
    /// Views `data` as `[rows, cols]`.
    ///
    /// # Errors
    /// [`Error::Length`] where `data` does not have `rows * cols` elements, [`Error::TooLarge`] where that product
    /// overflows.
    pub fn new(rows: usize, cols: usize, data: &'a [T]) -> Result<Self> {
        let expected = rows.checked_mul(cols).ok_or_else(|| Error::TooLarge { shape: vec![rows, cols] })?;
        if data.len() != expected {
            return Err(Error::Length { what: "matrix", expected, found: data.len() });
        }
        Ok(Self { rows, cols, data })
    }

    /// Number of rows (output features of a Linear weight).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (input features of a Linear weight).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// All elements, row-major.
    pub fn data(&self) -> &'a [T] {
        self.data
    }

    /// The elements of one row.
    ///
    /// # Panics
    /// Where `row` is not below [`MatrixRef::rows`], as indexing does.
    pub fn row(&self, row: usize) -> &'a [T] {
        &self.data[row * self.cols..][..self.cols]
    }

    /// Checks that every element is finite; on all threads.
    ///
    /// # Errors
    /// [`Error::NotANumber`] or [`Error::Infinite`] with the place of the first that is not.
    ///
    /// ```
    /// use twofour::MatrixRef;
    /// MatrixRef::new(1, 2, &[1.0f32, -0.0])?.expect_finite()?;
    /// let error = MatrixRef::new(2, 2, &[0.0, 1.0, f32::NAN, f32::INFINITY])?.expect_finite().unwrap_err();
    /// assert!(error.to_string().starts_with("row 1, column 0: NaN"));
    /// # Ok::<(), twofour::Error>(())
    /// ```
    pub fn expect_finite(&self) -> Result<()> {
        first_error((0..self.rows).into_par_iter(), |row| {
            self.band(row, 1).expect_finite_here().map_err(|e| e.below(row))
        })
    }

    /// [`MatrixRef::expect_finite`] on this thread.
    pub(crate) fn expect_finite_here(&self) -> Result<()> {
        let is_wrong = |value: &T| !value.to_f32().is_finite();
        // A pass that only looks whether there is any uses vector instructions.
        if !widest(|| self.data.iter().fold(false, |any, value| any | is_wrong(value))) {
            return Ok(());
        }
        match self.data.iter().position(is_wrong) {
            None => Ok(()),
            Some(at) => {
                let (row, col) = (at / self.cols, at % self.cols);
                Err(if self.data[at].to_f32().is_nan() {
                    Error::NotANumber { row, col }
                } else {
                    Error::Infinite { row, col }
                })
            }
        }
    }

    /// A band of the matrix: `height` rows from `first` on.
    pub(crate) fn band(&self, first: usize, height: usize) -> Self {
        Self { rows: height, cols: self.cols, data: &self.data[first * self.cols..][..height * self.cols] }
    }

    /// The transpose, `[cols, rows]` row-major, as a new buffer.
    pub fn transposed(&self) -> Vec<T> {
        let mut out = vec![T::ZERO; self.data.len()];
        const TILE: usize = 32;
        for r0 in (0..self.rows).step_by(TILE) {
            for c0 in (0..self.cols).step_by(TILE) {
                for r in r0..(r0 + TILE).min(self.rows) {
                    for c in c0..(c0 + TILE).min(self.cols) {
                        out[c * self.rows + r] = self.data[r * self.cols + c];
                    }
                }
            }
        }
        out
    }
}
