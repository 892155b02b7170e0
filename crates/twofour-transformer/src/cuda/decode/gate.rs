//! Gated activations to 8-bit integers.

use twofour_cuda::{
    DataType, Result,
    arguments::{Memory, positive, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::{
    Gate,
    raw::decode::gate::{QuantizedGateParameters, QuantizedGates},
};

/// Computes `gate(x[:, ..width]) · x[:, width..]` for `x` `[rows, 2 · width]` of f32, f16 or bf16, rounded to that
/// type, and quantizes it to i8 `values` `[rows, width]` with an f32 scale for each row: the bytes of
/// [`twofour::kernel::quantize`] for the results of [`crate::cuda::gated_forward`].
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for other types; those of [`Memory::at`] for a tensor that does
/// not fit; [`Error::Dimension`](twofour_cuda::Error::Dimension) for a width of 0;
/// [`Error::Driver`](twofour_cuda::Error::Driver).
pub fn gate_to_i8(
    context: &LayerContext,
    gate: Gate,
    (rows, width): (usize, usize),
    x: DeviceSlice<'_>,
    (values, scales): (DeviceSliceMut<'_>, DeviceSliceMut<'_>),
) -> Result<()> {
    let (dtype, count) = (x.dtype(), product(rows, width)?);
    let kernels = QuantizedGates::of(context, dtype)?;
    let parameters = QuantizedGateParameters {
        x: x.at("the input", context, dtype, product(count, 2)?)?,
        y: values.at("the result", context, DataType::I8, count)?,
        scales: scales.at("the scales", context, DataType::F32, rows)?,
        width: positive("the width of a gated activation", width)?,
    };
    if rows == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.run(context.raw(), gate.index(), side("rows", rows)?, &parameters) }
}
