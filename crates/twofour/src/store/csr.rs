//! Compressed sparse rows.

use super::{expect_indices, expect_lines, expect_values};
use crate::{Element, Mask, MatrixRef, Result, memory};

/// Compressed sparse rows: of each row the columns of what is stored, ascending, and the values.
#[derive(Debug, Clone, PartialEq)]
pub struct Csr<T> {
    rows: usize,
    cols: usize,
    starts: Vec<usize>,
    columns: Vec<u32>,
    values: Vec<T>,
}

impl<T: Element> Csr<T> {
    /// A matrix of which nothing is stored, to be filled row by row.
    pub(super) fn empty(rows: usize, cols: usize) -> Self {
        Csr { rows, cols, starts: vec![0; rows + 1], columns: Vec::new(), values: Vec::new() }
    }

    /// Appends to the row that is being filled.
    pub(super) fn push(&mut self, col: u32, value: T) {
        self.columns.push(col);
        self.values.push(value);
    }

    /// Ends a row.
    pub(super) fn end_row(&mut self, row: usize) {
        self.starts[row + 1] = self.columns.len();
    }

    /// Parts that are known to fit.
    pub(super) fn trusted(rows: usize, cols: usize, starts: Vec<usize>, columns: Vec<u32>, values: Vec<T>) -> Self {
        Csr { rows, cols, starts, columns, values }
    }

    /// From parts: where each row begins, `[rows + 1]`, and column and value of every stored element.
    ///
    /// # Errors
    /// [`crate::Error::Length`] for parts of other lengths; [`crate::Error::StorePart`] for beginnings that fall or do
    /// not end with the last element, and for columns that are out of range, do not ascend or are twice in a row;
    /// [`crate::Error::TooLarge`] for dimensions above 2³² - 1.
    pub fn from_parts(rows: usize, cols: usize, starts: Vec<usize>, columns: Vec<u32>, values: Vec<T>) -> Result<Self> {
        expect_indices(rows, cols)?;
        expect_lines("compressed sparse rows", rows, cols, &starts, &columns)?;
        expect_values(columns.len(), values.len())?;
        Ok(Csr { rows, cols, starts, columns, values })
    }

    /// The nonzeros of a dense matrix.
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`] for dimensions above 2³² - 1.
    pub fn from_dense(matrix: MatrixRef<'_, T>) -> Result<Self> {
        Self::from_masked(matrix, &Mask::of_nonzeros(matrix))
    }

    /// What a mask keeps of a dense matrix, zeros too.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where the shapes differ; [`crate::Error::TooLarge`] for dimensions above 2³² - 1.
    pub fn from_masked(matrix: MatrixRef<'_, T>, mask: &Mask) -> Result<Self> {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        expect_indices(rows, cols)?;
        mask.expect_shape("mask and matrix", rows, cols)?;
        let stored = mask.count();
        let mut csr =
            Csr { columns: Vec::with_capacity(stored), values: Vec::with_capacity(stored), ..Csr::empty(rows, cols) };
        for row in 0..rows {
            let values = matrix.row(row);
            for (i, word) in mask.row_words(row).iter().enumerate() {
                let mut bits = *word;
                while bits != 0 {
                    let col = 64 * i + bits.trailing_zeros() as usize;
                    csr.push(col as u32, values[col]);
                    bits &= bits - 1;
                }
            }
            csr.end_row(row);
        }
        Ok(csr)
    }

    /// The dense matrix, row-major.
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`], [`crate::Error::OutOfMemory`].
    pub fn to_dense(&self) -> Result<Vec<T>> {
        let elements = self.rows.checked_mul(self.cols);
        let elements = elements.ok_or_else(|| crate::Error::TooLarge { shape: vec![self.rows, self.cols] })?;
        let mut dense = memory::zeroed::<T>(elements)?;
        for (row, dense) in dense.chunks_mut(self.cols.max(1)).enumerate() {
            let (columns, values) = self.row(row);
            columns.iter().zip(values).for_each(|(col, value)| dense[*col as usize] = *value);
        }
        Ok(dense)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Where each row begins in columns and values, and where the last one ends: `[rows + 1]`.
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// The column of every stored element.
    pub fn columns(&self) -> &[u32] {
        &self.columns
    }

    /// The value of every stored element.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Columns and values of a row.
    ///
    /// # Panics
    /// Where `row` is not below [`Csr::rows`], as indexing does.
    pub fn row(&self, row: usize) -> (&[u32], &[T]) {
        let range = self.starts[row]..self.starts[row + 1];
        (&self.columns[range.clone()], &self.values[range])
    }

    /// The transpose.
    #[must_use]
    pub fn transposed(&self) -> Self {
        let mut starts = vec![0; self.cols + 1];
        self.columns.iter().for_each(|col| starts[*col as usize + 1] += 1);
        (0..self.cols).for_each(|col| starts[col + 1] += starts[col]);
        let mut next = starts.clone();
        let (mut columns, mut values) = (vec![0; self.columns.len()], self.values.clone());
        for row in 0..self.rows {
            let (cols, own) = self.row(row);
            for (col, value) in cols.iter().zip(own) {
                let at = &mut next[*col as usize];
                (columns[*at], values[*at]) = (row as u32, *value);
                *at += 1;
            }
        }
        Csr { rows: self.cols, cols: self.rows, starts, columns, values }
    }
}
