//! Sums, conversions, constants, factors and bounds, element by element.

use twofour_cuda::{
    DataType, Error, Result,
    arguments::Memory,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::pointwise::{Pointwise, PointwiseOperation, PointwiseParameters};

/// Computes `out = a + b` for tensors of one length and type: f32, f16 or bf16.
///
/// # Errors
/// [`Error::DataType`] for other types; those of [`Memory::at`] for a tensor that does not fit; [`Error::TooLarge`],
/// [`Error::Driver`].
pub fn add(context: &LayerContext, a: DeviceSlice<'_>, b: DeviceSlice<'_>, out: DeviceSliceMut<'_>) -> Result<()> {
    let (dtype, len) = (a.dtype(), a.len());
    let parameters = PointwiseParameters {
        a: a.at("the first addend", context, dtype, len)?,
        b: b.at("the second addend", context, dtype, len)?,
        out: out.at("the sum", context, dtype, len)?,
        count: len as u64,
        value: 0.0,
    };
    let kernels = Pointwise::of(context, dtype)?;
    // SAFETY: the slices have been found to be equally long, and the stream is of their device.
    unsafe { kernels.run(context.raw(), PointwiseOperation::Add, &parameters) }
}

/// Computes `y ← y + x` for tensors of one length and type: f32, f16 or bf16.
///
/// # Errors
/// Those of [`add`].
pub fn add_in_place(context: &LayerContext, x: DeviceSlice<'_>, y: DeviceSliceMut<'_>) -> Result<()> {
    let (dtype, len) = (x.dtype(), x.len());
    let sum = y.at("the sum", context, dtype, len)?;
    let parameters = PointwiseParameters {
        a: x.at("the addend", context, dtype, len)?,
        b: sum,
        out: sum,
        count: len as u64,
        value: 0.0,
    };
    let kernels = Pointwise::of(context, dtype)?;
    // SAFETY: the slices have been found to be equally long, an element of the sum is written by the thread that read
    // it, and the stream is of their device.
    unsafe { kernels.run(context.raw(), PointwiseOperation::Add, &parameters) }
}

/// Converts f32 to f32, f16 or bf16, rounding to nearest even, or one of these to f32.
///
/// # Errors
/// Those of [`add`]; [`Error::DataType`] where neither tensor is f32.
pub fn convert(context: &LayerContext, from: DeviceSlice<'_>, to: DeviceSliceMut<'_>) -> Result<()> {
    let (operation, dtype) = match (from.dtype(), to.dtype()) {
        (DataType::F32, dtype) => (PointwiseOperation::FromF32, dtype),
        (dtype, DataType::F32) => (PointwiseOperation::ToF32, dtype),
        (_, dtype) => {
            let (operation, supported) = ("a conversion from another type than f32", "f32");
            return Err(Error::DataType { operation, dtype, supported });
        }
    };
    let parameters = PointwiseParameters {
        a: from.at("the input of a conversion", context, from.dtype(), from.len())?,
        out: to.at("the result of a conversion", context, to.dtype(), from.len())?,
        count: from.len() as u64,
        ..PointwiseParameters::default()
    };
    let kernels = Pointwise::of(context, dtype)?;
    // SAFETY: the slices have been found to be equally long, and the stream is of their device.
    unsafe { kernels.run(context.raw(), operation, &parameters) }
}

/// Copies a tensor of any type.
///
/// # Errors
/// Those of [`add`], but for no type.
pub fn copy(context: &LayerContext, from: DeviceSlice<'_>, to: DeviceSliceMut<'_>) -> Result<()> {
    let (dtype, len) = (from.dtype(), from.len());
    let source = from.at("the tensor to be copied", context, dtype, len)?;
    let target = to.at("the copy", context, dtype, len)?;
    if len == 0 {
        return Ok(());
    }
    context.device().bind()?;
    let stream = context.stream().cu_stream();
    // SAFETY: the slices have been found to be equally long, and the stream is of their device.
    let copied = unsafe { cudarc::driver::result::memcpy_dtod_async(target, source, len * dtype.bytes(), stream) };
    copied.map_err(|error| Error::driver("copying a tensor", error))
}

/// Writes a value, rounded to the tensor's type, to every element of a tensor of f32, f16 or bf16.
///
/// # Errors
/// Those of [`add`].
pub fn fill(context: &LayerContext, value: f32, out: DeviceSliceMut<'_>) -> Result<()> {
    let (dtype, len) = (out.dtype(), out.len());
    let parameters = PointwiseParameters {
        out: out.at("the tensor to be filled", context, dtype, len)?,
        count: len as u64,
        value,
        ..PointwiseParameters::default()
    };
    let kernels = Pointwise::of(context, dtype)?;
    // SAFETY: the slice has that many elements, and the stream is of its device.
    unsafe { kernels.run(context.raw(), PointwiseOperation::Fill, &parameters) }
}

/// Computes `y ← factor · y` for a tensor of f32, f16 or bf16.
///
/// # Errors
/// Those of [`add`].
pub fn scale_in_place(context: &LayerContext, factor: f32, y: DeviceSliceMut<'_>) -> Result<()> {
    in_place(context, PointwiseOperation::Scale, factor, y)
}

/// Computes `y = cap · tanh(x / cap)` for tensors of one length and type: f32, f16 or bf16.
///
/// # Errors
/// Those of [`add`].
pub fn soft_cap(context: &LayerContext, cap: f32, x: DeviceSlice<'_>, y: DeviceSliceMut<'_>) -> Result<()> {
    let (dtype, len) = (x.dtype(), x.len());
    let parameters = PointwiseParameters {
        a: x.at("the scores", context, dtype, len)?,
        out: y.at("the bounded scores", context, dtype, len)?,
        count: len as u64,
        value: cap,
        ..PointwiseParameters::default()
    };
    let kernels = Pointwise::of(context, dtype)?;
    // SAFETY: the slices have been found to be equally long, and the stream is of their device.
    unsafe { kernels.run(context.raw(), PointwiseOperation::Bound, &parameters) }
}

/// Computes `dy ← dy · (1 - tanh(x / cap)²)`, the gradient of [`soft_cap`], for tensors of one length and type: f32,
/// f16 or bf16.
///
/// # Errors
/// Those of [`add`].
pub fn soft_cap_gradient(context: &LayerContext, cap: f32, x: DeviceSlice<'_>, dy: DeviceSliceMut<'_>) -> Result<()> {
    let (dtype, len) = (x.dtype(), x.len());
    let out = dy.at("the gradient of bounded scores", context, dtype, len)?;
    let a = x.at("the scores", context, dtype, len)?;
    let parameters = PointwiseParameters { a, b: out, out, count: len as u64, value: cap };
    let kernels = Pointwise::of(context, dtype)?;
    // SAFETY: the slices have been found to be equally long, an element is written by the thread that read it, and the
    // stream is of their device.
    unsafe { kernels.run(context.raw(), PointwiseOperation::BoundGradient, &parameters) }
}

/// Bounds the elements of a tensor of f32, f16 or bf16: `y ← cap · tanh(y / cap)`.
///
/// # Errors
/// Those of [`add`].
pub fn soft_cap_in_place(context: &LayerContext, cap: f32, y: DeviceSliceMut<'_>) -> Result<()> {
    in_place(context, PointwiseOperation::Bound, cap, y)
}

fn in_place(context: &LayerContext, operation: PointwiseOperation, value: f32, y: DeviceSliceMut<'_>) -> Result<()> {
    let (dtype, len) = (y.dtype(), y.len());
    let out = y.at("the tensor to be changed", context, dtype, len)?;
    let parameters = PointwiseParameters { a: out, out, count: len as u64, value, ..PointwiseParameters::default() };
    let kernels = Pointwise::of(context, dtype)?;
    // SAFETY: the slice has that many elements, an element is written by the thread that read it, and the stream is of
    // its device.
    unsafe { kernels.run(context.raw(), operation, &parameters) }
}
