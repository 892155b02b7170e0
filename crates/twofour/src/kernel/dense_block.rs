//! A dense weight where it lies.

use std::ops::Range;

use super::strips::ROWS;

/// A dense weight, or some rows of one.
#[derive(Debug)]
pub(super) struct DenseBlock<'a, T> {
    /// Rows.
    pub rows: usize,
    /// `[rows, cols]`.
    pub values: &'a [T],
    /// Columns.
    pub cols: usize,
}

impl<T> Clone for DenseBlock<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DenseBlock<'_, T> {}

impl<T> DenseBlock<'_, T> {
    /// The rows of some strips.
    pub(super) fn strips(&self, strips: Range<usize>) -> Self {
        let rows = strips.start * ROWS..(strips.end * ROWS).min(self.rows);
        DenseBlock { rows: rows.len(), values: &self.values[rows.start * self.cols..rows.end * self.cols], ..*self }
    }
}
