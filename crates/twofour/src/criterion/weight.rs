//! A weight of any dtype, read row by row in f32.

use std::fmt;

use crate::{Element, MatrixRef};

/// Copies a row to a slice.
type ReadRow<'a> = Box<dyn Fn(usize, &mut [f32]) + Send + Sync + 'a>;

/// A borrowed weight `[rows, cols]` of any dtype, read row by row in f32.
pub struct Weight<'a> {
    rows: usize,
    cols: usize,
    read: ReadRow<'a>,
}

impl<'a> Weight<'a> {
    /// A weight in memory.
    pub fn new<T: Element>(matrix: MatrixRef<'a, T>) -> Self {
        let read = move |row, out: &mut [f32]| {
            for (out, value) in out.iter_mut().zip(matrix.row(row)) {
                *out = value.to_f32();
            }
        };
        Self { rows: matrix.rows(), cols: matrix.cols(), read: Box::new(read) }
    }

    /// Number of rows (output features).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (input features).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Copies a row to `out`, which has [`Weight::cols`] elements.
    ///
    /// # Panics
    /// Where `row` is out of range, as indexing does.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        (self.read)(row, out);
    }
}

impl fmt::Debug for Weight<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Weight").field("rows", &self.rows).field("cols", &self.cols).finish_non_exhaustive()
    }
}
