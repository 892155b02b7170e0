//! Compressed sparse columns.

use super::{Csr, expect_indices, expect_lines, expect_values};
use crate::{Element, MatrixRef, Result};

/// Compressed sparse columns: of each column the rows of what is stored, ascending, and the values.
#[derive(Debug, Clone, PartialEq)]
pub struct Csc<T> {
    /// The transpose, whose rows are the columns.
    transpose: Csr<T>,
}

impl<T: Element> Csc<T> {
    /// From parts: where each column begins, `[cols + 1]`, and row and value of every stored element.
    ///
    /// # Errors
    /// Those of [`Csr::from_parts`], with rows in the place of columns.
    pub fn from_parts(
        rows: usize,
        cols: usize,
        starts: Vec<usize>,
        row_indices: Vec<u32>,
        values: Vec<T>,
    ) -> Result<Self> {
        expect_indices(rows, cols)?;
        expect_lines("compressed sparse columns", cols, rows, &starts, &row_indices)?;
        expect_values(row_indices.len(), values.len())?;
        Ok(Csc { transpose: Csr::trusted(cols, rows, starts, row_indices, values) })
    }

    /// The nonzeros of a dense matrix.
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`] for dimensions above 2³² - 1.
    pub fn from_dense(matrix: MatrixRef<'_, T>) -> Result<Self> {
        Ok(Self::from(&Csr::from_dense(matrix)?))
    }

    /// The dense matrix, row-major.
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`], [`crate::Error::OutOfMemory`].
    pub fn to_dense(&self) -> Result<Vec<T>> {
        Csr::from(self).to_dense()
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.transpose.cols()
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.transpose.rows()
    }

    /// Where each column begins in rows and values, and where the last one ends: `[cols + 1]`.
    pub fn starts(&self) -> &[usize] {
        self.transpose.starts()
    }

    /// The row of every stored element.
    pub fn row_indices(&self) -> &[u32] {
        self.transpose.columns()
    }

    /// The value of every stored element.
    pub fn values(&self) -> &[T] {
        self.transpose.values()
    }
}

impl<T: Element> From<&Csr<T>> for Csc<T> {
    fn from(csr: &Csr<T>) -> Self {
        Csc { transpose: csr.transposed() }
    }
}

impl<T: Element> From<&Csc<T>> for Csr<T> {
    fn from(csc: &Csc<T>) -> Self {
        csc.transpose.transposed()
    }
}
