//! Gated activations.

use super::shape::{Memory, positive, product, side};
use crate::{
    Result,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
    raw::gated::GatedParameters,
};

/// The function of a gated activation (Shazeer, "GLU Variants Improve Transformer", 2020).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gate {
    /// SiLU: SwiGLU.
    Silu,
    /// GELU, `x Φ(x)`: GEGLU.
    Gelu,
    /// GELU's approximation by tanh.
    TanhGelu,
    /// ReLU: ReGLU.
    Relu,
}

impl Gate {
    pub(crate) fn index(self) -> usize {
        match self {
            Gate::Silu => 0,
            Gate::Gelu => 1,
            Gate::TanhGelu => 2,
            Gate::Relu => 3,
        }
    }
}

/// Computes `y = gate(x[:, ..width]) · x[:, width..]` for `x` `[rows, 2 · width]` and `y` `[rows, width]`, of f32, f16 or bf16.
///
/// # Errors
/// [`Error::DataType`](crate::Error::DataType) for other types; [`Error::Length`](crate::Error::Length), [`Error::SliceType`](crate::Error::SliceType),
/// [`Error::OtherDevice`](crate::Error::OtherDevice) and [`Error::Pointer`](crate::Error::Pointer) for a tensor that does not fit;
/// [`Error::Dimension`](crate::Error::Dimension) for a width of 0; [`Error::Driver`](crate::Error::Driver).
pub fn gated_forward(
    context: &LayerContext,
    gate: Gate,
    (rows, width): (usize, usize),
    x: DeviceSlice<'_>,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, count) = (x.dtype(), product(rows, width)?);
    let parameters = GatedParameters {
        x: x.at("the input", context, dtype, product(count, 2)?)?,
        dy: 0,
        out: y.at("the result", context, dtype, count)?,
        count: count as u64,
        width: positive("the width of a gated activation", width)?,
    };
    run(context, gate, rows, &parameters, x)
}

/// Computes `dx` `[rows, 2 · width]`, the gradient of [`gated_forward`]'s input, from `dy` `[rows, width]`. `dx` must not be `x`.
///
/// # Errors
/// Those of [`gated_forward`].
pub fn gated_backward(
    context: &LayerContext,
    gate: Gate,
    (rows, width): (usize, usize),
    x: DeviceSlice<'_>,
    dy: DeviceSlice<'_>,
    dx: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, count) = (x.dtype(), product(rows, width)?);
    let parameters = GatedParameters {
        x: x.at("the input", context, dtype, product(count, 2)?)?,
        dy: dy.at("the output gradient", context, dtype, count)?,
        out: dx.at("the input gradient", context, dtype, product(count, 2)?)?,
        count: count as u64,
        width: positive("the width of a gated activation", width)?,
    };
    run(context, gate, rows, &parameters, x)
}

fn run(
    context: &LayerContext,
    gate: Gate,
    rows: usize,
    parameters: &GatedParameters,
    x: DeviceSlice<'_>,
) -> Result<()> {
    side("rows", rows)?;
    let kernels = context.gated(x.dtype())?;
    if rows == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.run(context.raw(), gate.index(), parameters) }
}
