//! Gated activations to 8-bit integers.

use crate::{
    DataType, Result,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
    raw::decode::gate::QuantizedGateParameters,
    transformer::{
        Gate,
        shape::{Memory, positive, product, side},
    },
};

/// Computes `gate(x[:, ..width]) · x[:, width..]` for `x` `[rows, 2 · width]` of f32, f16 or bf16, rounded to that type, and quantizes it to i8 `values` `[rows, width]` with an f32
/// scale for each row: the bytes of [`twofour::kernel::quantize`] for the results of [`crate::transformer::gated_forward`].
///
/// # Errors
/// [`Error::DataType`](crate::Error::DataType) for other types; [`Error::Length`](crate::Error::Length), [`Error::SliceType`](crate::Error::SliceType),
/// [`Error::OtherDevice`](crate::Error::OtherDevice) and [`Error::Pointer`](crate::Error::Pointer) for a tensor that does not fit;
/// [`Error::Dimension`](crate::Error::Dimension) for a width of 0; [`Error::Driver`](crate::Error::Driver).
pub fn gate_to_i8(
    context: &LayerContext,
    gate: Gate,
    (rows, width): (usize, usize),
    x: DeviceSlice<'_>,
    (values, scales): (DeviceSliceMut<'_>, DeviceSliceMut<'_>),
) -> Result<()> {
    let (dtype, count) = (x.dtype(), product(rows, width)?);
    let kernels = context.quantized_gates(dtype)?;
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
