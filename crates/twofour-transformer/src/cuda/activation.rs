//! Activations, element by element.

use twofour_cuda::{
    Result,
    arguments::Memory,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
    raw::elementwise::{ElementFunction, FunctionGradient},
};

/// Computes `y = function(x)` for tensors of f32, f16 or bf16. GELU is `x Φ(x)`.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for other types; those of [`Memory::at`] for a tensor that does
/// not fit; [`Error::TooLarge`](twofour_cuda::Error::TooLarge), [`Error::Driver`](twofour_cuda::Error::Driver).
pub fn activation_forward(
    context: &LayerContext,
    function: ElementFunction,
    x: DeviceSlice<'_>,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (x.dtype(), x.len());
    let input = x.at("the input", context, dtype, len)?;
    let out = y.at("the result", context, dtype, len)?;
    let kernels = context.elementwise(dtype)?;
    // SAFETY: both tensors have that many elements, as was checked; the stream is of their device.
    unsafe { kernels.apply(context.raw(), function, input, out, len) }
}

/// Computes `dy ← dy · function'(x)`.
///
/// # Errors
/// Those of [`activation_forward`].
pub fn activation_backward_in_place(
    context: &LayerContext,
    function: ElementFunction,
    x: DeviceSlice<'_>,
    dy: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (x.dtype(), x.len());
    let input = x.at("the input", context, dtype, len)?;
    let gradient = dy.at("the output gradient", context, dtype, len)?;
    let tensors = FunctionGradient { input, gradient, out: gradient, tiles: None };
    let kernels = context.elementwise(dtype)?;
    // SAFETY: both tensors have that many elements, an element is written by the thread that read it, and the stream is
    // of their device.
    unsafe { kernels.gradient(context.raw(), function, tensors, len, 1) }
}

/// Computes `dx = dy · function'(x)`.
///
/// # Errors
/// Those of [`activation_forward`].
pub fn activation_backward(
    context: &LayerContext,
    function: ElementFunction,
    x: DeviceSlice<'_>,
    dy: DeviceSlice<'_>,
    dx: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (x.dtype(), x.len());
    let tensors = FunctionGradient {
        input: x.at("the input", context, dtype, len)?,
        gradient: dy.at("the output gradient", context, dtype, len)?,
        out: dx.at("the input gradient", context, dtype, len)?,
        tiles: None,
    };
    let kernels = context.elementwise(dtype)?;
    // SAFETY: the tensors have that many elements, as was checked; the stream is of their device.
    unsafe { kernels.gradient(context.raw(), function, tensors, len, 1) }
}
