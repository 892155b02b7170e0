//! Tensors that linear layers read.

use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, DeviceSliceMut, LayerContext};

use super::{CudaLinear, linear::Input};
use crate::Result;

/// A tensor that a linear layer reads: as floats, or quantized.
#[derive(Debug)]
pub(in crate::model) struct Hidden {
    pub(in crate::model) floats: DeviceBuffer,
    pub(in crate::model) integers: DeviceBuffer,
    pub(in crate::model) scales: DeviceBuffer,
}

impl Hidden {
    /// Room for so many tokens: for floats, and for integers where a layer reads them.
    pub(in crate::model) fn new(
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
    pub(in crate::model) fn input(&self, layer: &CudaLinear, (tokens, width): (usize, usize)) -> Result<Input<'_>> {
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
