//! Sums of rows with weights.

use twofour_cuda::{
    DataType, Result,
    arguments::{Memory, positive, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::weighted_rows::{WeightedRows, WeightedRowsParameters};

/// The shape of [`weighted_rows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowSums {
    /// Sums.
    pub tokens: usize,
    /// Rows of each sum.
    pub each: usize,
    /// Rows there are.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

/// Computes `out[t] = Σ weights[t, i] · rows[places[t, i]]` in f32, in the order of `i`, rounded once.
///
/// `rows` is `[rows, width]` of f32, f16 or bf16, `places` u32 and `weights` f32 `[tokens, each]`, and `out` `[tokens,
/// width]`. A place beyond the rows adds nothing.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for rows of another type;
/// [`Error::Length`](twofour_cuda::Error::Length), [`Error::SliceType`](twofour_cuda::Error::SliceType),
/// [`Error::OtherDevice`](twofour_cuda::Error::OtherDevice) and [`Error::Pointer`](twofour_cuda::Error::Pointer) for a
/// tensor that does not fit; [`Error::Dimension`](twofour_cuda::Error::Dimension) for a width of 0;
/// [`Error::Driver`](twofour_cuda::Error::Driver).
pub fn weighted_rows(
    context: &LayerContext,
    shape: RowSums,
    rows: DeviceSlice<'_>,
    (places, weights): (DeviceSlice<'_>, DeviceSlice<'_>),
    out: DeviceSliceMut<'_>,
) -> Result<()> {
    let RowSums { tokens, each, rows: count, width } = shape;
    let (dtype, listed) = (rows.dtype(), product(tokens, each)?);
    let kernels = WeightedRows::of(context, dtype)?;
    let parameters = WeightedRowsParameters {
        rows: rows.at("the rows", context, dtype, product(count, width)?)?,
        places: places.at("the places of rows", context, DataType::I32, listed)?,
        weights: weights.at("the weights of rows", context, DataType::F32, listed)?,
        out: out.at("the sums", context, dtype, product(tokens, width)?)?,
        count: side("rows", count)?,
        each: side("rows of a sum", each)?,
        width: positive("the width of rows", width)?,
    };
    if tokens == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.run(context.raw(), side("sums", tokens)?, &parameters) }
}
