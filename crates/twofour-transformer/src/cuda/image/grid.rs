//! Neighbours in a grid, and factors of columns.

#[cfg(doc)]
use twofour_cuda::Error;
use twofour_cuda::{
    DataType, Result,
    arguments::{Memory, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::image::{GridParameters, ImageGrid};

/// Gathers the values at each place of `x` `[images, rows, columns, channels]` and at the eight around it, row by row,
/// to `y` `[images, rows, columns, 9 · channels]`; beyond the image they are zeros. A convolution of 3x3 is a linear
/// layer over `y`.
///
/// # Errors
/// [`Error::DataType`] for other types than f32, f16 and bf16; those of [`Memory::at`] for a tensor that does not fit;
/// [`Error::Dimension`] for a side that kernels cannot count; [`Error::Driver`].
pub fn neighbours(
    context: &LayerContext,
    (images, [rows, columns], channels): (usize, [usize; 2], usize),
    x: DeviceSlice<'_>,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let dtype = x.dtype();
    let places = product(images, product(rows, columns)?)?;
    let len = product(places, channels)?;
    let parameters = GridParameters {
        x: x.at("the grid", context, dtype, len)?,
        y: y.at("the neighbours", context, dtype, product(len, 9)?)?,
        factors: 0,
        rows: side("rows", rows)?,
        columns: side("columns", columns)?,
        channels: side("channels", channels)?,
    };
    let places = side("places", places)?;
    let kernels = ImageGrid::of(context, dtype)?;
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.around(context.raw(), places, &parameters) }
}

/// Multiplies each row of `y`, `[rows, columns]` of f32, f16 or bf16, by the factors of the columns, f32 `[columns]`,
/// in place: layer scale (Touvron et al., "Going deeper with Image Transformers", 2021).
///
/// # Errors
/// Those of [`neighbours`].
pub fn scale_rows(
    context: &LayerContext,
    (rows, columns): (usize, usize),
    factors: DeviceSlice<'_>,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let dtype = y.dtype();
    let len = product(rows, columns)?;
    let parameters = GridParameters {
        y: y.at("the rows", context, dtype, len)?,
        factors: factors.at("the factors", context, DataType::F32, columns)?,
        channels: side("columns", columns)?,
        ..GridParameters::default()
    };
    let rows = side("rows", rows)?;
    let kernels = ImageGrid::of(context, dtype)?;
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.scale(context.raw(), rows, &parameters) }
}
