//! A block-sparse weight, for one engine.
//!
//! Blocks lie one after another, as block sparse rows have them: a weight that somebody else holds is multiplied where
//! it lies. Few tokens are multiplied with a block as with a dense weight, many tokens in the tiles of one.

use std::{
    ops::{Deref, Range},
    time::Duration,
};

use super::{
    Engine,
    aligned::Aligned,
    arguments::{expect_bias, expect_len},
    dense::Rows,
    engine::Cpu,
    epilogue::Epilogue,
    few::{self, rows::Walk},
    format::KernelElement,
    many::{BlockProduct, column_blocks},
    scratch::Scratch,
    share::{share_expecting, threads},
    strips::ROWS,
};
use crate::{
    Result,
    store::{Bsr, expect_block_sparse},
};

/// Tokens from which a block is multiplied in tiles.
const MANY: usize = 12;

/// A block-sparse weight `[out_features, in_features]`, for one [`Engine`]. `B` holds its blocks: memory of its own
/// ([`BlockSparseWeight`]), or that of somebody else ([`BlockSparseRef`]).
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
pub struct BlockSparse<B> {
    rows: usize,
    cols: usize,
    block: [usize; 2],
    /// Where each row of blocks begins, and where the last one ends.
    starts: Vec<usize>,
    /// The column of each block, counted in blocks.
    columns: Vec<u32>,
    /// `[blocks, height, width]`.
    values: B,
    cpu: Cpu,
}

/// A block-sparse weight in memory of its own.
pub type BlockSparseWeight<T> = BlockSparse<Aligned<T>>;

/// A block-sparse weight that somebody else holds, such as a tensor of another library.
pub type BlockSparseRef<'a, T> = BlockSparse<&'a [T]>;

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
        BlockSparse::of_store(weight, Aligned::copy_of(weight.values())?, engine)
    }
}

impl<'a, T: KernelElement> BlockSparseRef<'a, T> {
    /// The blocks of a store, for [`Engine::best`].
    ///
    /// # Errors
    /// Those of [`Engine::best`].
    pub fn of(weight: &'a Bsr<T>) -> Result<Self> {
        BlockSparse::of_store(weight, weight.values(), Engine::best()?)
    }

    /// From parts, for one engine. They are those of [`Bsr::from_parts`]: where each row of blocks begins, the column
    /// of every stored block, and the blocks, `[blocks, height, width]`. What lies beyond the matrix must be zero.
    ///
    /// # Errors
    /// Those of [`Bsr::from_parts`], but for values beyond the matrix; [`crate::Error::Engine`] where this machine
    /// cannot run it.
    pub fn new(
        (rows, cols): (usize, usize),
        block: [usize; 2],
        starts: Vec<usize>,
        columns: Vec<u32>,
        values: &'a [T],
        engine: Engine,
    ) -> Result<Self> {
        expect_block_sparse((rows, cols), block, (&starts, &columns), values.len())?;
        Ok(BlockSparse { rows, cols, block, starts, columns, values, cpu: Cpu::detect(engine)? })
    }
}

impl<T: KernelElement, B: Deref<Target = [T]>> BlockSparse<B> {
    /// `values` are those of the store, here or elsewhere.
    fn of_store(weight: &Bsr<T>, values: B, engine: Engine) -> Result<Self> {
        Ok(BlockSparse {
            rows: weight.rows(),
            cols: weight.cols(),
            block: weight.block(),
            starts: weight.starts().to_vec(),
            columns: weight.columns().to_vec(),
            values,
            cpu: Cpu::detect(engine)?,
        })
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
        size_of_val(&*self.values) + size_of_val(&*self.starts) + size_of_val(&*self.columns)
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
        let Self { rows, cols, block, ref starts, ref columns, ref values, cpu } = *self;
        let weight = Blocks { rows, cols, block, starts, columns, values };
        if tokens >= MANY {
            cpu.run(BlockProduct { weight, x, epilogue, y });
        } else {
            few(cpu, weight, x, tokens, epilogue, y);
        }
        Ok(())
    }
}

/// A block-sparse weight, to be multiplied.
#[derive(Debug, Clone, Copy)]
pub(super) struct Blocks<'a, T> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    block: [usize; 2],
    starts: &'a [usize],
    columns: &'a [u32],
    values: &'a [T],
}

impl<'a, T: KernelElement> Blocks<'a, T> {
    /// Rows of a row of blocks.
    pub(super) fn height(self) -> usize {
        self.block[0].min(self.rows.max(1))
    }

    /// Rows of blocks.
    pub(super) fn block_rows(self) -> usize {
        self.starts.len() - 1
    }

    /// Stored elements of a row, in the mean.
    pub(super) fn mean_depth(self) -> usize {
        self.values.len() / self.rows.max(1)
    }

    /// The blocks of a row of blocks, but for rows beyond the matrix, and the columns of the matrix that each is of.
    pub(super) fn of_row(self, block_row: usize) -> impl Iterator<Item = (Rows<'a, T>, Range<usize>)> {
        let [height, width] = self.block;
        let rows = height.min(self.rows - block_row * height);
        (self.starts[block_row]..self.starts[block_row + 1]).map(move |index| {
            let (values, first) =
                (&self.values[index * height * width..][..rows * width], self.columns[index] as usize);
            let columns = first * width..(first * width).saturating_add(width).min(self.cols);
            (Rows { rows, cols: width, values }, columns)
        })
    }
}

/// Each block is a dense matrix, which the activations of its columns are multiplied with.
fn few<T: KernelElement>(cpu: Cpu, weight: Blocks<'_, T>, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) {
    let (outs, cols, height, width) = (weight.rows, weight.cols, weight.height(), weight.block[1]);
    // Zeros complete the last block's columns; where no block is stored, its width may be any.
    let stride = if weight.columns.is_empty() { cols } else { cols.next_multiple_of(width) };
    let x = few::widen(x, cols, stride);
    // A few parts per thread even out what else the machine is doing.
    let block_rows = weight.block_rows().div_ceil(4 * threads()).max(1);
    let elements = weight.mean_depth().saturating_mul(outs).saturating_mul(1 + tokens / 4);
    let parts = column_blocks(y, outs, block_rows * height);
    share_expecting(
        Duration::from_nanos((elements / 16) as u64),
        parts.into_iter().enumerate(),
        || Scratch::<f32>::take(2 * height.next_multiple_of(ROWS) * tokens),
        |memory, (part, mut y)| {
            let (sums, products) = memory.split_at_mut(height.next_multiple_of(ROWS) * tokens);
            let first = y.cols().start;
            for block_row in part * block_rows..((part + 1) * block_rows).min(weight.block_rows()) {
                let above = block_row * height;
                let rows = height.min(outs - above);
                // `[strip, token, ROWS]`.
                let lines = rows.next_multiple_of(ROWS) * tokens;
                sums[..lines].fill(0.0);
                for (weight, columns) in weight.of_row(block_row) {
                    let products = &mut products[..lines];
                    cpu.run(Walk::<T> { weight, x: &x[columns.start..], stride, out: products });
                    sums.iter_mut().zip(&*products).for_each(|(sum, product)| *sum += product);
                }
                for (strip, sums) in sums[..lines].chunks_exact(tokens * ROWS).enumerate() {
                    let above = above + strip * ROWS;
                    let count = ROWS.min(block_row * height + rows - above);
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
