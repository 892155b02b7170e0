//! Coordinates.

use super::{Csr, expect_indices, expect_values};
use crate::{Element, Error, MatrixRef, Result};

/// Coordinates: row, column and value of every stored element, row by row and in a row by ascending column.
#[derive(Debug, Clone, PartialEq)]
pub struct Coo<T> {
    rows: usize,
    cols: usize,
    row_indices: Vec<u32>,
    columns: Vec<u32>,
    values: Vec<T>,
}

impl<T: Element> Coo<T> {
    /// From parts in order of row, then of column.
    ///
    /// # Errors
    /// [`Error::Length`] for parts of different lengths; [`Error::StorePart`] for indices that are out of range or not
    /// in order, and for a place that is there twice; [`Error::TooLarge`] for dimensions above 2³² - 1.
    pub fn from_parts(
        rows: usize,
        cols: usize,
        row_indices: Vec<u32>,
        columns: Vec<u32>,
        values: Vec<T>,
    ) -> Result<Self> {
        expect_indices(rows, cols)?;
        if row_indices.len() != columns.len() {
            let (expected, found) = (row_indices.len(), columns.len());
            return Err(Error::Length { what: "columns of a sparse matrix", expected, found });
        }
        expect_values(columns.len(), values.len())?;
        let mut before = None;
        for (index, (row, col)) in row_indices.iter().zip(&columns).enumerate() {
            let (form, at) = ("coordinates", (*row as usize, *col as usize));
            let bad = |part, found, expected| Err(Error::StorePart { form, part, index, found, expected });
            if at.0 >= rows {
                return bad("row", at.0, format!("less than {rows}"));
            }
            if at.1 >= cols {
                return bad("column", at.1, format!("less than {cols}"));
            }
            if before.is_some_and(|before| before == at) {
                return bad("column", at.1, format!("another: row {}, column {} is there twice", at.0, at.1));
            }
            if before.is_some_and(|before| before > at) {
                return bad("row", at.0, "in order of row, then of column".to_owned());
            }
            before = Some(at);
        }
        Ok(Coo { rows, cols, row_indices, columns, values })
    }

    /// From elements in any order, each with its row and column.
    ///
    /// # Errors
    /// Those of [`Coo::from_parts`], with the index of the element in order.
    pub fn from_entries(rows: usize, cols: usize, mut entries: Vec<(u32, u32, T)>) -> Result<Self> {
        entries.sort_by_key(|(row, col, _)| (*row, *col));
        let part = |index: fn(&(u32, u32, T)) -> u32| entries.iter().map(index).collect();
        let (row_indices, columns) = (part(|entry| entry.0), part(|entry| entry.1));
        Self::from_parts(rows, cols, row_indices, columns, entries.iter().map(|entry| entry.2).collect())
    }

    /// The nonzeros of a dense matrix.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for dimensions above 2³² - 1.
    pub fn from_dense(matrix: MatrixRef<'_, T>) -> Result<Self> {
        Ok(Self::from(&Csr::from_dense(matrix)?))
    }

    /// The dense matrix, row-major.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::OutOfMemory`].
    pub fn to_dense(&self) -> Result<Vec<T>> {
        Csr::from(self).to_dense()
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The row of every stored element.
    pub fn row_indices(&self) -> &[u32] {
        &self.row_indices
    }

    /// The column of every stored element.
    pub fn columns(&self) -> &[u32] {
        &self.columns
    }

    /// The value of every stored element.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Where each row begins.
    pub(crate) fn starts(&self) -> Vec<usize> {
        let mut starts = vec![0; self.rows + 1];
        self.row_indices.iter().for_each(|row| starts[*row as usize + 1] += 1);
        (0..self.rows).for_each(|row| starts[row + 1] += starts[row]);
        starts
    }
}

impl<T: Element> From<&Csr<T>> for Coo<T> {
    fn from(csr: &Csr<T>) -> Self {
        let lines = csr.starts().windows(2).zip(0u32..);
        let row_indices = lines.flat_map(|(line, row)| std::iter::repeat_n(row, line[1] - line[0])).collect();
        let (columns, values) = (csr.columns().to_vec(), csr.values().to_vec());
        Coo { rows: csr.rows(), cols: csr.cols(), row_indices, columns, values }
    }
}

impl<T: Element> From<&Coo<T>> for Csr<T> {
    fn from(coo: &Coo<T>) -> Self {
        Csr::trusted(coo.rows, coo.cols, coo.starts(), coo.columns.clone(), coo.values.clone())
    }
}
