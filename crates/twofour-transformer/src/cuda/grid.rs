//! Weights rounded to integers times scales.

use twofour_cuda::{
    DataType, Result,
    arguments::Memory,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::grid::{Grid, GridParameters};

/// Writes `clamp(round(w / s), -largest, largest) · s` to `rounded`, of f32, f16 or bf16, for each element of an f32
/// weight and its f32 scale, ties to even; +0.0 where the scale is zero.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for another type; those of [`Memory::at`] for a tensor that does
/// not fit; [`Error::Driver`](twofour_cuda::Error::Driver).
pub fn round_to_grid(
    context: &LayerContext,
    largest: f32,
    scales: DeviceSlice<'_>,
    weight: DeviceSlice<'_>,
    rounded: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (rounded.dtype(), weight.len());
    let parameters = GridParameters {
        weight: weight.at("the weight", context, DataType::F32, len)?,
        scales: scales.at("the scales", context, DataType::F32, len)?,
        rounded: rounded.at("the rounded weight", context, dtype, len)?,
        elements: len as u64,
        largest,
    };
    let kernel = Grid::of(context, dtype)?;
    // SAFETY: the slices have been found to be equally long, and the stream is of their device.
    unsafe { kernel.run(context.raw(), &parameters) }
}
