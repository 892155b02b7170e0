//! A block-sparse weight, packed for one engine.
//!
//! Of each row of blocks the stored blocks lie side by side, as one dense matrix: `[rows, stored columns]`. Few tokens
//! are multiplied with it as with a dense weight, after the activations of its columns have been put side by side, too;
//! many tokens block by block, in the tiles of a dense weight.

use std::{ops::Range, time::Duration};

use super::{
    Engine,
    aligned::Aligned,
    arguments::{expect_bias, expect_len},
    dense::Rows,
    engine::Cpu,
    epilogue::Epilogue,
    few::rows::Walk,
    format::KernelElement,
    many::{BlockProduct, column_blocks},
    scratch::Scratch,
    share::{share_expecting, threads},
    strips::ROWS,
};
use crate::{Result, store::Bsr};

/// How many times more tokens than of a dense weight count as many: a row of blocks stays in a core's cache while more
/// tokens are multiplied with it.
const MANY: usize = 2;

/// A block-sparse weight `[out_features, in_features]`, for one [`Engine`].
///
/// ```
/// use twofour::{MatrixRef, kernel::{BlockSparseWeight, Epilogue}, store::Bsr};
/// let w = [1.0f32, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0];
/// let weight = BlockSparseWeight::pack(&Bsr::from_dense(MatrixRef::new(2, 4, &w)?, [2, 2])?)?;
/// let mut y = [0.0; 2];
/// weight.linear(&[1.0, 10.0, 5.0, 5.0], 1, Epilogue::default(), &mut y)?;
/// assert_eq!(y, [21.0, 43.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct BlockSparseWeight<T> {
    rows: usize,
    cols: usize,
    height: usize,
    /// Of each row of blocks where its matrix begins in `values`, and where the last one ends.
    starts: Vec<usize>,
    /// Of each row of blocks the columns of its matrix.
    columns: Vec<Vec<Range<usize>>>,
    values: Aligned<T>,
    cpu: Cpu,
}

impl<T: KernelElement> BlockSparseWeight<T> {
    /// Packs for [`Engine::best`].
    ///
    /// # Errors
    /// Those of [`Engine::best`]; [`crate::Error::OutOfMemory`].
    pub fn pack(weight: &Bsr<T>) -> Result<Self> {
        Self::pack_for(weight, Engine::best()?)
    }

    /// Packs for one engine.
    ///
    /// # Errors
    /// [`crate::Error::Engine`] where this machine cannot run it; [`crate::Error::OutOfMemory`].
    pub fn pack_for(weight: &Bsr<T>, engine: Engine) -> Result<Self> {
        let cpu = Cpu::detect(engine)?;
        let (mut starts, mut columns) = (vec![0], Vec::new());
        let mut end = 0;
        for block_row in 0..weight.block_rows() {
            let own: Vec<Range<usize>> = weight.blocks_of(block_row).map(|index| weight.cols_of(index)).collect();
            end += weight.rows_of(block_row).len() * own.iter().map(Range::len).sum::<usize>();
            starts.push(end);
            columns.push(own);
        }
        let mut values = Aligned::try_zeroed(end)?;
        for block_row in 0..weight.block_rows() {
            let rows = weight.rows_of(block_row).len();
            let values = &mut values[starts[block_row]..starts[block_row + 1]];
            let width = values.len() / rows.max(1);
            for (row, values) in values.chunks_mut(width.max(1)).enumerate() {
                let mut rest = values;
                for (index, columns) in weight.blocks_of(block_row).zip(&columns[block_row]) {
                    let (own, after) = rest.split_at_mut(columns.len());
                    own.copy_from_slice(&weight.block_values(index)[row * weight.block()[1]..][..columns.len()]);
                    rest = after;
                }
            }
        }
        let (rows, cols, height) = (weight.rows(), weight.cols(), weight.block()[0].min(weight.rows().max(1)));
        Ok(BlockSparseWeight { rows, cols, height, starts, columns, values, cpu })
    }

    /// Rows of the weight.
    pub fn out_features(&self) -> usize {
        self.rows
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.cols
    }

    /// Bytes of the values and of their places.
    pub fn bytes(&self) -> usize {
        let blocks: usize = self.columns.iter().map(Vec::len).sum();
        size_of_val(&*self.values) + size_of_val(&*self.starts) + blocks * size_of::<Range<usize>>()
    }

    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Products accumulate
    /// in f32.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        expect_len("x", x, tokens, self.cols)?;
        expect_len("y", y, tokens, self.rows)?;
        expect_bias(&epilogue, self.rows)?;
        if y.is_empty() {
            return Ok(());
        }
        let weight = Blocks { weight: self };
        if tokens >= self.cpu.many().dense.saturating_mul(MANY) {
            self.cpu.run(BlockProduct { weight, x, epilogue, y });
        } else {
            few(self.cpu, weight, x, tokens, epilogue, y);
        }
        Ok(())
    }
}

/// A block-sparse weight, to be multiplied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blocks<'a, T> {
    weight: &'a BlockSparseWeight<T>,
}

impl<'a, T: KernelElement> Blocks<'a, T> {
    pub(super) fn rows(self) -> usize {
        self.weight.rows
    }

    pub(super) fn cols(self) -> usize {
        self.weight.cols
    }

    /// Rows of a row of blocks.
    pub(super) fn height(self) -> usize {
        self.weight.height
    }

    /// Rows of blocks.
    pub(super) fn block_rows(self) -> usize {
        self.weight.columns.len()
    }

    /// Stored elements of a row, in the mean.
    pub(super) fn mean_depth(self) -> usize {
        self.weight.values.len() / self.weight.rows.max(1)
    }

    /// The matrix of a row of blocks.
    pub(super) fn of_row(self, block_row: usize) -> Rows<'a, T> {
        let weight = self.weight;
        let values = &weight.values[weight.starts[block_row]..weight.starts[block_row + 1]];
        let rows = weight.height.min(weight.rows - block_row * weight.height);
        Rows { rows, cols: values.len() / rows, values }
    }

    /// The columns of that matrix in pieces of at most so many: where each begins in it, and in the weight.
    pub(super) fn pieces(self, block_row: usize, most: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        let mut begin = 0;
        self.weight.columns[block_row].iter().flat_map(move |columns| {
            let first = begin;
            begin += columns.len();
            let (start, end) = (columns.start, columns.end);
            (start..end).step_by(most).map(move |at| (first + at - start, at..(at + most).min(end)))
        })
    }
}

/// A row of blocks at a time is a dense matrix, which the activations of its columns are multiplied with.
fn few<T: KernelElement>(cpu: Cpu, weight: Blocks<'_, T>, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) {
    let (outs, cols, height) = (weight.rows(), weight.cols(), weight.height());
    // A few parts per thread even out what else the machine is doing.
    let block_rows = weight.block_rows().div_ceil(4 * threads()).max(1);
    let elements = weight.mean_depth().saturating_mul(outs).saturating_mul(1 + tokens / 4);
    let parts = column_blocks(y, outs, block_rows * height);
    share_expecting(
        Duration::from_nanos((elements / 16) as u64),
        parts.into_iter().enumerate(),
        || (),
        |(), (part, mut y)| {
            let first = y.cols().start;
            for block_row in part * block_rows..((part + 1) * block_rows).min(weight.block_rows()) {
                let rows = weight.of_row(block_row);
                let mut sums = Scratch::<f32>::take(rows.rows.next_multiple_of(ROWS) * tokens);
                if rows.cols == 0 {
                    sums.fill(0.0);
                } else {
                    let mut own = Scratch::<f32>::take(tokens * rows.cols);
                    for (x, own) in x.chunks_exact(cols).zip(own.chunks_exact_mut(rows.cols)) {
                        let mut rest = own;
                        for columns in &weight.weight.columns[block_row] {
                            let (own, after) = rest.split_at_mut(columns.len());
                            own.iter_mut().zip(&x[columns.clone()]).for_each(|(own, x)| *own = x.to_f32());
                            rest = after;
                        }
                    }
                    cpu.run(Walk::<T> { weight: rows, x: &own, stride: rows.cols, out: &mut sums });
                }
                // `[strip, token, ROWS]`.
                for (strip, sums) in sums.chunks_exact(tokens * ROWS).enumerate() {
                    let above = block_row * height + strip * ROWS;
                    let count = ROWS.min(block_row * height + rows.rows - above);
                    for (token, sums) in sums.as_chunks::<ROWS>().0.iter().enumerate() {
                        let mut products = *sums;
                        epilogue.apply(&mut products[..count], above);
                        let y = &mut y.row_mut(token)[above - first..][..count];
                        y.iter_mut().zip(products).for_each(|(y, product)| *y = T::from_f32(product));
                    }
                }
            }
        },
    );
}
