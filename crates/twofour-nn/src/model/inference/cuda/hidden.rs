//! Tensors between linear layers.

use half::{bf16, f16};
use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, DeviceSliceMut, LayerContext};

use super::{CudaLinear, linear::Input};
use crate::{
    Result,
    model::inference::passes::{narrowed, widened},
};

/// A tensor that a linear layer reads: as floats, or quantized.
#[derive(Debug)]
pub(super) struct Hidden {
    pub(super) floats: DeviceBuffer,
    pub(super) integers: DeviceBuffer,
    pub(super) scales: DeviceBuffer,
}

impl Hidden {
    /// Room for so many tokens: for floats, and for integers where a layer reads them.
    pub(super) fn new(
        context: &LayerContext,
        dtype: DataType,
        (tokens, width): (usize, usize),
        integers: bool,
    ) -> Result<Self> {
        let (of_integers, of_scales) = if integers { (tokens * width, tokens) } else { (0, 0) };
        Ok(Hidden {
            floats: DeviceBuffer::zeros(context, dtype, tokens * width)?,
            integers: DeviceBuffer::zeros(context, DataType::I8, of_integers)?,
            scales: DeviceBuffer::zeros(context, DataType::F32, of_scales)?,
        })
    }

    /// The first tokens, as the layer reads them.
    pub(super) fn input(&self, layer: &CudaLinear, (tokens, width): (usize, usize)) -> Result<Input<'_>> {
        Ok(match layer.takes_integers() {
            true => Input::Integers(
                self.integers.as_slice().part(0..tokens * width)?,
                self.scales.as_slice().part(0..tokens)?,
            ),
            false => Input::Floats(self.floats.as_slice().part(0..tokens * width)?),
        })
    }
}

/// The first elements of a buffer.
pub(in crate::model) fn first(buffer: &mut DeviceBuffer, len: usize) -> Result<DeviceSliceMut<'_>> {
    Ok(buffer.as_slice_mut().split_at(len)?.0)
}

/// The values on the device, rounded to f32, f16 or bf16.
pub(in crate::model) fn upload(context: &LayerContext, dtype: DataType, values: &[f32]) -> Result<DeviceBuffer> {
    Ok(match dtype {
        DataType::BF16 => DeviceBuffer::from_host(context, &narrowed::<bf16>(values))?,
        DataType::F16 => DeviceBuffer::from_host(context, &narrowed::<f16>(values))?,
        _ => DeviceBuffer::from_host(context, values)?,
    })
}

/// The values of a buffer of f32, f16 or bf16; waits for the device.
pub(in crate::model) fn download(buffer: &DeviceBuffer) -> Result<Vec<f32>> {
    Ok(match buffer.dtype() {
        DataType::BF16 => widened(&buffer.to_host::<bf16>()?),
        DataType::F16 => widened(&buffer.to_host::<f16>()?),
        _ => buffer.to_host()?,
    })
}
