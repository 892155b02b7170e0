//! The error of rows that are to be others.

use twofour_cuda::{
    DataType, Result,
    arguments::{Memory, positive, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::{
    ErrorMeasure,
    cuda::raw::squared_error::{SquaredError, SquaredErrorParameters},
};

/// Adds the sum over the rows of `x` and `target`, both `[rows, width]`, of `weight` times their error to `loss`, an
/// f32 `[1]`, and writes the gradient for `x`, times `factor`, to `dx`. All but the loss are of f32, f16 or bf16.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for other types; those of [`Memory::at`] for a tensor that does
/// not fit; [`Error::Dimension`](twofour_cuda::Error::Dimension) for a width of 0; those of allocating workspace;
/// [`Error::Driver`](twofour_cuda::Error::Driver).
pub fn squared_error(
    context: &LayerContext,
    measure: ErrorMeasure,
    (rows, width): (usize, usize),
    (x, target): (DeviceSlice<'_>, DeviceSlice<'_>),
    (weight, factor): (f32, f32),
    dx: DeviceSliceMut<'_>,
    loss: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (x.dtype(), product(rows, width)?);
    let kernels = SquaredError::of(context, dtype)?;
    let mut parameters = SquaredErrorParameters {
        x: x.at("the rows", context, dtype, len)?,
        target: target.at("the target rows", context, dtype, len)?,
        dx: dx.at("the gradient", context, dtype, len)?,
        errors: 0,
        loss: loss.at("the loss", context, DataType::F32, 1)?,
        rows: side("rows", rows)?,
        width: positive("the width of rows", width)?,
        weight,
        factor,
        is_relative: u32::from(measure == ErrorMeasure::RelativeSquared),
    };
    let mut work = context.work();
    [parameters.errors] = work.parts([4 * rows])?;
    // SAFETY: the slices have been found to be as long as the shape requires, the workspace has room for the rows'
    // errors, and the stream is of their device.
    unsafe { kernels.run(context.raw(), &parameters) }
}
