//! Gated activations.

use twofour_cuda::{
    Result,
    arguments::{Memory, positive, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::gated::{Gated, GatedParameters};

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

/// Computes `y = gate(x[:, ..width]) · x[:, width..]` for `x` `[rows, 2 · width]` and `y` `[rows, width]`, of f32, f16
/// or bf16.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for other types; those of [`Memory::at`] for a tensor that does
/// not fit; [`Error::Dimension`](twofour_cuda::Error::Dimension) for a width of 0;
/// [`Error::Driver`](twofour_cuda::Error::Driver).
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
        out: y.at("the result", context, dtype, count)?,
        count: count as u64,
        width: positive("the width of a gated activation", width)?,
        ..GatedParameters::default()
    };
    run(context, gate, rows, &parameters, x)
}

/// The gate of gpt-oss: `gate · sigmoid(slope · gate) · (up + 1)`, with the gate clamped to at most the limit and `up`
/// to ± the limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClampedGate {
    /// The slope.
    pub slope: f32,
    /// The limit.
    pub limit: f32,
}

/// Computes `y` `[rows, width]` from the gates `x[:, ..width]` and from `up`, `x[:, width..]`, for `x` `[rows, 2 ·
/// width]` of f32, f16 or bf16.
///
/// # Errors
/// Those of [`gated_forward`].
pub fn clamped_gate_forward(
    context: &LayerContext,
    ClampedGate { slope, limit }: ClampedGate,
    (rows, width): (usize, usize),
    x: DeviceSlice<'_>,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, count) = (x.dtype(), product(rows, width)?);
    let kernels = Gated::of(context, dtype)?;
    let parameters = GatedParameters {
        x: x.at("the input", context, dtype, product(count, 2)?)?,
        out: y.at("the result", context, dtype, count)?,
        count: count as u64,
        width: positive("the width of a gated activation", width)?,
        slope,
        limit,
        ..GatedParameters::default()
    };
    if rows == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.clamped(context.raw(), &parameters) }
}

/// Computes `dx` `[rows, 2 · width]`, the gradient of [`gated_forward`]'s input, from `dy` `[rows, width]`. `dx` must
/// not be `x`.
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
        ..GatedParameters::default()
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
    let kernels = Gated::of(context, x.dtype())?;
    if rows == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.run(context.raw(), gate.index(), parameters) }
}
