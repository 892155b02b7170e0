//! Weights under masks.

use twofour_cuda::{
    DataType, DevicePtr, Result,
    arguments::{Memory, expect_multiple, positive},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::masking::{Masking, MaskingParameters};

/// Returns the u32 words that a row of a mask has for [`apply_mask`]: those of whole 64-bit words.
pub const fn mask_words_of_row(cols: usize) -> usize {
    2 * cols.div_ceil(64)
}

/// Rounds an f32 weight with rows of `cols` elements to `masked`, of f32, f16 or bf16, with +0.0 in place of every
/// element that the mask prunes.
///
/// The mask is u32 words, held as elements of [`DataType::I32`], `[rows, mask_words_of_row(cols)]`: bit `b` of word `j`
/// of a row stands for column `32 j + b`, 1 where the element is kept.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for another type;
/// [`Error::Multiple`](twofour_cuda::Error::Multiple) for a weight of no whole rows; those of [`Memory::at`] for a
/// tensor that does not fit; [`Error::Driver`](twofour_cuda::Error::Driver).
pub fn apply_mask(
    context: &LayerContext,
    mask: DeviceSlice<'_>,
    cols: usize,
    weight: DeviceSlice<'_>,
    masked: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (masked.dtype(), weight.len());
    let weight = weight.at("the weight", context, DataType::F32, len)?;
    let masked = masked.at("the masked weight", context, dtype, len)?;
    run(context, mask, (len, cols), dtype, [weight, masked])
}

/// Writes +0.0 in place of every element that a mask prunes of f32 values with rows of `cols` elements; the mask is
/// that of [`apply_mask`].
///
/// # Errors
/// Those of [`apply_mask`].
pub fn apply_mask_in_place(
    context: &LayerContext,
    mask: DeviceSlice<'_>,
    cols: usize,
    values: DeviceSliceMut<'_>,
) -> Result<()> {
    let len = values.len();
    let values = values.at("the values", context, DataType::F32, len)?;
    run(context, mask, (len, cols), DataType::F32, [values, values])
}

fn run(
    context: &LayerContext,
    mask: DeviceSlice<'_>,
    (len, cols): (usize, usize),
    dtype: DataType,
    [weight, masked]: [DevicePtr; 2],
) -> Result<()> {
    let width = positive("columns of the weight", cols)?;
    expect_multiple("elements of the weight", len, cols)?;
    let (rows, words) = (len / cols, mask_words_of_row(cols));
    let groups_of_row = width.div_ceil(4);
    let parameters = MaskingParameters {
        weight,
        mask: mask.at("the mask", context, DataType::I32, rows * words)?,
        masked,
        groups: rows as u64 * u64::from(groups_of_row),
        cols: width,
        groups_of_row,
        words_of_row: words as u32,
    };
    let kernel = Masking::of(context, dtype)?;
    // SAFETY: the weight and the result have been found to be equally long, in whole rows, the mask to have the words
    // of these rows, and the stream is of their device. They are distinct borrows, or one f32 slice.
    unsafe { kernel.run(context.raw(), &parameters) }
}
