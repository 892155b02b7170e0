//! Block sparse rows.

use std::ops::Range;

use super::{Csr, expect_indices, expect_lines, expect_values};
use crate::{Element, Error, MatrixRef, Result, memory};

/// Block sparse rows: of each row of blocks the columns of those that are stored, ascending, and the blocks.
///
/// Blocks `[height, width]` begin at multiples of their height and width. Those that the matrix cuts off are completed
/// with +0.0.
#[derive(Debug, Clone, PartialEq)]
pub struct Bsr<T> {
    rows: usize,
    cols: usize,
    block: [usize; 2],
    starts: Vec<usize>,
    columns: Vec<u32>,
    values: Vec<T>,
}

/// The elements of a block, unless it has none or they overflow.
fn elements_of([height, width]: [usize; 2]) -> Result<usize> {
    let elements = height.checked_mul(width).ok_or_else(|| Error::TooLarge { shape: vec![height, width] })?;
    if elements == 0 {
        return Err(Error::Setting { what: "rows or columns of a block", value: 0.0, expected: "at least 1" });
    }
    Ok(elements)
}

/// An error unless parts are those of block sparse rows, `starts` and `columns` as [`Bsr::from_parts`] has them.
///
/// # Errors
/// Those of [`Bsr::from_parts`], but for values beyond the matrix.
pub(crate) fn expect_block_sparse(
    (rows, cols): (usize, usize),
    block: [usize; 2],
    (starts, columns): (&[usize], &[u32]),
    values: usize,
) -> Result<()> {
    expect_indices(rows, cols)?;
    let elements = elements_of(block)?;
    expect_lines(FORM, rows.div_ceil(block[0]), cols.div_ceil(block[1]), starts, columns)?;
    let expected = columns.len().checked_mul(elements).ok_or_else(|| Error::TooLarge { shape: vec![rows, cols] })?;
    expect_values(expected, values)
}

const FORM: &str = "block sparse rows";

impl<T: Element> Bsr<T> {
    /// From parts: where each row of blocks begins, `[rows of blocks + 1]`, the column of every stored block, counted
    /// in blocks, and the blocks, `[blocks, height, width]`.
    ///
    /// # Errors
    /// Those of [`Csr::from_parts`], with blocks in the place of elements; [`Error::Setting`] for blocks without
    /// elements; [`Error::StorePart`] for a value beyond the matrix that is not +0.0.
    pub fn from_parts(
        (rows, cols): (usize, usize),
        block: [usize; 2],
        starts: Vec<usize>,
        columns: Vec<u32>,
        values: Vec<T>,
    ) -> Result<Self> {
        expect_block_sparse((rows, cols), block, (&starts, &columns), values.len())?;
        let elements = block[0] * block[1];
        let bsr = Bsr { rows, cols, block, starts, columns, values };
        for block_row in 0..bsr.block_rows() {
            for index in bsr.blocks_of(block_row) {
                let inside = (bsr.rows_of(block_row).len(), bsr.cols_of(index).len());
                let beyond = |i: &usize| i / block[1] >= inside.0 || i % block[1] >= inside.1;
                let values = bsr.block_values(index);
                let is_zero = |i: &usize| values[*i].is_zero() && !values[*i].is_negative_zero();
                if let Some(i) = (0..elements).filter(beyond).find(|i| !is_zero(i)) {
                    let expected = format!("a block with +0.0 beyond the matrix, not {:?}", values[i]);
                    return Err(Error::StorePart { form: FORM, part: "block", index, found: index, expected });
                }
            }
        }
        Ok(bsr)
    }

    /// The blocks of a dense matrix that have a nonzero.
    ///
    /// # Errors
    /// [`Error::TooLarge`] for dimensions above 2³² - 1; [`Error::Setting`] for blocks without elements;
    /// [`Error::OutOfMemory`].
    pub fn from_dense(matrix: MatrixRef<'_, T>, block: [usize; 2]) -> Result<Self> {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        expect_indices(rows, cols)?;
        let (elements, [height, width]) = (elements_of(block)?, block);
        let (mut starts, mut columns) = (vec![0], Vec::new());
        for first in (0..rows).step_by(height) {
            let lines = first..first.saturating_add(height).min(rows);
            for (block_col, from) in (0..cols).step_by(width).enumerate() {
                let to = from.saturating_add(width).min(cols);
                if lines.clone().any(|row| matrix.row(row)[from..to].iter().any(|value| !value.is_zero())) {
                    columns.push(block_col as u32);
                }
            }
            starts.push(columns.len());
        }
        let stored = columns.len().checked_mul(elements).ok_or_else(|| Error::TooLarge { shape: vec![rows, cols] })?;
        let values = memory::zeroed::<T>(stored)?;
        let mut bsr = Bsr { rows, cols, block, starts, columns, values };
        for block_row in 0..bsr.block_rows() {
            for index in bsr.blocks_of(block_row) {
                let (rows, cols) = (bsr.rows_of(block_row), bsr.cols_of(index));
                let values = bsr.values[index * elements..][..elements].chunks_exact_mut(width);
                rows.zip(values).for_each(|(row, values)| {
                    values[..cols.len()].copy_from_slice(&matrix.row(row)[cols.clone()]);
                });
            }
        }
        Ok(bsr)
    }

    /// The blocks that hold what is stored.
    ///
    /// # Errors
    /// Those of [`Bsr::from_dense`].
    pub fn from_csr(csr: &Csr<T>, block: [usize; 2]) -> Result<Self> {
        let (rows, cols, [height, width]) = (csr.rows(), csr.cols(), block);
        let elements = elements_of(block)?;
        let (mut starts, mut columns) = (vec![0], Vec::new());
        for first in (0..rows).step_by(height) {
            let lines = first..first.saturating_add(height).min(rows);
            let from = columns.len();
            columns.extend(lines.flat_map(|row| csr.row(row).0).map(|col| (*col as usize / width) as u32));
            columns[from..].sort_unstable();
            let mut own = columns.split_off(from);
            own.dedup();
            columns.append(&mut own);
            starts.push(columns.len());
        }
        let stored = columns.len().checked_mul(elements).ok_or_else(|| Error::TooLarge { shape: vec![rows, cols] })?;
        let mut values = memory::zeroed::<T>(stored)?;
        for row in 0..rows {
            let blocks = starts[row / height]..starts[row / height + 1];
            let (cols, own) = csr.row(row);
            let mut at = blocks.start;
            for (col, value) in cols.iter().zip(own) {
                let col = *col as usize;
                while columns[at] as usize != col / width {
                    at += 1;
                }
                values[at * elements + row % height * width + col % width] = *value;
            }
        }
        Ok(Bsr { rows, cols, block, starts, columns, values })
    }

    /// The dense matrix, row-major.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::OutOfMemory`].
    pub fn to_dense(&self) -> Result<Vec<T>> {
        let (rows, cols) = (self.rows, self.cols);
        let elements = rows.checked_mul(cols).ok_or_else(|| Error::TooLarge { shape: vec![rows, cols] })?;
        let mut dense = memory::zeroed::<T>(elements)?;
        for block_row in 0..self.block_rows() {
            for index in self.blocks_of(block_row) {
                let own = self.cols_of(index);
                for (row, values) in self.rows_of(block_row).zip(self.block_values(index).chunks_exact(self.block[1])) {
                    dense[row * cols..][own.clone()].copy_from_slice(&values[..own.len()]);
                }
            }
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

    /// Rows and columns of a block.
    pub fn block(&self) -> [usize; 2] {
        self.block
    }

    /// Where each row of blocks begins in columns and values, and where the last one ends: `[rows of blocks + 1]`.
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// The column of every stored block, counted in blocks.
    pub fn columns(&self) -> &[u32] {
        &self.columns
    }

    /// The blocks, `[blocks, height, width]`.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Rows of blocks.
    pub(crate) fn block_rows(&self) -> usize {
        self.starts.len() - 1
    }

    /// The blocks of a row of blocks.
    pub(crate) fn blocks_of(&self, block_row: usize) -> Range<usize> {
        self.starts[block_row]..self.starts[block_row + 1]
    }

    /// The rows of the matrix in a row of blocks.
    pub(crate) fn rows_of(&self, block_row: usize) -> Range<usize> {
        let first = block_row * self.block[0];
        first..first.saturating_add(self.block[0]).min(self.rows)
    }

    /// The columns of the matrix in a block.
    pub(crate) fn cols_of(&self, index: usize) -> Range<usize> {
        let first = self.columns[index] as usize * self.block[1];
        first..first.saturating_add(self.block[1]).min(self.cols)
    }

    /// A block, row-major.
    pub(crate) fn block_values(&self, index: usize) -> &[T] {
        let elements = self.block[0] * self.block[1];
        &self.values[index * elements..][..elements]
    }
}

impl<T: Element> From<&Bsr<T>> for Csr<T> {
    /// The nonzeros of the blocks.
    fn from(bsr: &Bsr<T>) -> Self {
        let mut csr = Csr::empty(bsr.rows, bsr.cols);
        for row in 0..bsr.rows {
            for index in bsr.blocks_of(row / bsr.block[0]) {
                let cols = bsr.cols_of(index);
                let values = &bsr.block_values(index)[row % bsr.block[0] * bsr.block[1]..][..cols.len()];
                for (col, value) in cols.zip(values).filter(|(_, value)| !value.is_zero()) {
                    csr.push(col as u32, *value);
                }
            }
            csr.end_row(row);
        }
        csr
    }
}
