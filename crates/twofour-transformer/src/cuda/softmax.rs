//! Softmax of rows.

use twofour_cuda::{
    DataType, Result,
    arguments::{MAX_DIMENSION, Memory, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::softmax::{Softmax, SoftmaxParameters};

/// Computes the softmax of the rows of `x`, f32 `[rows, cols]`, to `y` of f32, f16 or bf16. An element of -∞ has
/// probability 0; a row of nothing else becomes NaN.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for results of another type; those of [`Memory::at`] for a tensor
/// that does not fit; [`Error::Dimension`](twofour_cuda::Error::Dimension) for a side that kernels cannot count; those
/// of allocating workspace; [`Error::Driver`](twofour_cuda::Error::Driver).
pub fn softmax(
    context: &LayerContext,
    (rows, cols): (usize, usize),
    x: DeviceSlice<'_>,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (y.dtype(), product(rows, cols)?);
    let scores = x.at("the input of a softmax", context, DataType::F32, len)?;
    let probabilities = y.at("the result of a softmax", context, dtype, len)?;
    run(context, (rows, cols), dtype, (scores, probabilities), false)
}

/// Replaces the softmax `y` of rows, `[rows, cols]` of f32, f16 or bf16, by the gradient of the softmax's input, `y ⊙
/// (dy - Σ y dy)`, for the gradient `dy` of the softmax, f32 `[rows, cols]`.
///
/// # Errors
/// Those of [`softmax()`].
pub fn softmax_gradient(
    context: &LayerContext,
    (rows, cols): (usize, usize),
    dy: DeviceSlice<'_>,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (y.dtype(), product(rows, cols)?);
    let gradient = dy.at("the gradient of a softmax", context, DataType::F32, len)?;
    let probabilities = y.at("the softmax", context, dtype, len)?;
    run(context, (rows, cols), dtype, (gradient, probabilities), true)
}

fn run(
    context: &LayerContext,
    (rows, cols): (usize, usize),
    dtype: DataType,
    (scores, probabilities): (u64, u64),
    is_gradient: bool,
) -> Result<()> {
    let kernels = Softmax::of(context, dtype)?;
    let (rows, positions) = (side("rows of a softmax", rows)?, side("columns of a softmax", cols)?);
    if rows == 0 || positions == 0 {
        return Ok(());
    }
    let mut work = context.work();
    let [lse] = work.parts([4 * rows as usize])?;
    let parameters = SoftmaxParameters {
        scores,
        probabilities,
        lse,
        positions,
        scale: 1.0,
        window: MAX_DIMENSION as u32,
        ..SoftmaxParameters::default()
    };
    // SAFETY: the slices have been found to be as long as the shape requires, the workspace has room for a number of
    // each row, and the stream is of their device.
    unsafe { kernels.run(context.raw(), is_gradient, rows, &parameters) }
}
