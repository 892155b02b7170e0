//! Products with a weight in square blocks ([`twofour::store`]'s BSR), in borrowed device memory.

use super::super::{DeviceSlice, DeviceSliceMut, LayerContext, elements};
use crate::{DataType, Error, Result, raw::block_sparse::BlockSparseWeight};

pub use crate::raw::block_sparse::is_supported;

/// A weight `[rows, cols]` of which square blocks are stored, row of blocks by row of blocks.
#[derive(Debug, Clone, Copy)]
pub struct BlockSparseSlice<'a> {
    /// Where each row of blocks begins, and where the last ends, in i64: two elements of i32 each.
    pub crow: DeviceSlice<'a>,
    /// The column of each block, in blocks, in i64: two elements of i32 each.
    pub col: DeviceSlice<'a>,
    /// `[blocks, block, block]`: zeros complete the last rows and columns.
    pub values: DeviceSlice<'a>,
    /// Rows and columns of a block.
    pub block: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// Launches `y = x · Wᵀ` for `x` `[tokens, cols]` and `y` `[tokens, rows]`, both of the weight's type, f16 or bf16.
/// Sums are f32. An index outside of the weight counts as a block of zeros: it is on the device, and checking it
/// would wait.
///
/// # Errors
/// [`Error::Length`], [`Error::SliceType`] and [`Error::OtherDevice`] for a slice with another length, type or
/// device; [`Error::DataType`] for another type; [`Error::Setting`] and [`Error::Multiple`] for what [`is_supported`]
/// denies; [`Error::Pointer`] for memory that is not aligned to 16 bytes; [`Error::Capturing`] where the kernel must
/// be loaded during a capture.
pub fn linear(
    context: &LayerContext,
    weight: BlockSparseSlice<'_>,
    x: DeviceSlice<'_>,
    tokens: usize,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, BlockSparseSlice { block, rows, cols, .. }) = (x.dtype(), weight);
    let kernels = context.block_sparse(dtype, block)?;
    let blocks = weight.col.len() / 2;
    let too_large = || Error::TooLarge { rows, cols };
    let values = blocks.checked_mul(elements(block, block)?).ok_or_else(too_large)?;
    let [crow, col] = [(rows.div_ceil(block) + 1) * 2, blocks * 2];
    let stored = BlockSparseWeight {
        crow: weight.crow.expect("where rows of blocks begin", context, DataType::I32, crow)?,
        col: weight.col.expect("columns of blocks", context, DataType::I32, col)?,
        values: weight.values.expect("the blocks", context, dtype, values)?,
        blocks,
        block,
        rows,
        cols,
    };
    let x = x.expect("the input", context, dtype, elements(tokens, cols)?)?;
    let y = y.expect("the output", context, dtype, elements(tokens, rows)?)?;
    // SAFETY: lengths are checked, and slices are valid until the stream has passed this call.
    unsafe { kernels.run(context.raw(), stored, x, tokens, y) }
}
