//! Pruning to `N:4`.

use twofour_cuda::{
    DataType, Result,
    arguments::{Memory, expect_multiple, positive},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::keep_of_four::{KeepOfFour, KeepOfFourParameters};

/// Rounds an f32 weight with rows of `cols` elements to `kept`, of f32, f16 or bf16, and sets all but the `count`
/// largest magnitudes of every group of four in a row to zero. Of equal magnitudes the lower index is kept; a NaN
/// counts as the largest.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for another type;
/// [`Error::Multiple`](twofour_cuda::Error::Multiple) for a weight of no whole rows; those of [`Memory::at`] for a
/// tensor that does not fit; [`Error::Driver`](twofour_cuda::Error::Driver).
pub fn keep_of_four(
    context: &LayerContext,
    count: u32,
    weight: DeviceSlice<'_>,
    cols: usize,
    kept: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (kept.dtype(), weight.len());
    let width = positive("columns of the weight", cols)?;
    expect_multiple("elements of the weight", len, cols)?;
    let groups_of_row = width.div_ceil(4);
    let parameters = KeepOfFourParameters {
        weight: weight.at("the weight", context, DataType::F32, len)?,
        kept: kept.at("the pruned weight", context, dtype, len)?,
        groups: (len / cols) as u64 * u64::from(groups_of_row),
        cols: width,
        groups_of_row,
        count,
    };
    let kernel = KeepOfFour::of(context, dtype)?;
    // SAFETY: the slices have been found to be equally long, in whole rows, and the stream is of their device.
    unsafe { kernel.run(context.raw(), &parameters) }
}
