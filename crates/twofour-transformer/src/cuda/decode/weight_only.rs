//! Dense linear layers with a quantized weight and floats as input.

use twofour_cuda::{
    DataType, Error, Result,
    arguments::{Memory, expect_multiple, expect_pointers, product, side},
    layer::{DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::decode::dense::{DenseForm, DenseOperands, DenseProducts, GROUP, MAX_TOKENS};

/// A dense layer `y = x · Wᵀ` whose weight alone is quantized: to 8-bit integers with a scale for each row, or to int4
/// with a scale for each group of 64 columns. `x` and `y` are of f16 or bf16; integers are converted to that type
/// exactly, sums are in f32.
///
/// It is for few tokens: more than 32 are multiplied 32 at a time. It is what 2:4 weights are compared with; it is in
/// this crate because it shares its kernel with [`DenseInt8Linear`](super::DenseInt8Linear), which runs models.
#[derive(Debug)]
pub struct WeightOnlyLinear {
    context: LayerContext,
    form: DenseForm,
    weight: DeviceBuffer,
    scales: DeviceBuffer,
    shape: (usize, usize),
}

impl WeightOnlyLinear {
    /// Returns the layer of a weight `[out_features, in_features]` of i8 with f32 scales `[out_features]`.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::SliceType`] and [`Error::OtherDevice`] for tensors that do not fit;
    /// [`Error::Multiple`] for `in_features` that are not a multiple of 64.
    pub fn int8(
        context: &LayerContext,
        shape: (usize, usize),
        weight: DeviceBuffer,
        scales: DeviceBuffer,
    ) -> Result<Self> {
        Self::with(context, DenseForm::Int8, shape, (weight, product(shape.0, shape.1)?), (scales, shape.0))
    }

    /// Returns the layer of an int4 weight `[out_features, in_features]` in the order of
    /// [`WeightOnlyLinear::packed_int4`], i8 `[out_features · in_features / 2]`, with f16 scales `[out_features,
    /// in_features / 64]`.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::SliceType`] and [`Error::OtherDevice`] for tensors that do not fit;
    /// [`Error::Multiple`] for `in_features` that are not a multiple of 128.
    pub fn int4(
        context: &LayerContext,
        shape: (usize, usize),
        weight: DeviceBuffer,
        scales: DeviceBuffer,
    ) -> Result<Self> {
        let elements = product(shape.0, shape.1)?;
        Self::with(context, DenseForm::Int4, shape, (weight, elements / 2), (scales, elements / GROUP))
    }

    fn with(
        context: &LayerContext,
        form: DenseForm,
        shape: (usize, usize),
        (weight, bytes): (DeviceBuffer, usize),
        (scales, count): (DeviceBuffer, usize),
    ) -> Result<Self> {
        expect_multiple("in_features", shape.1, form.step())?;
        let of_scales = if form == DenseForm::Int4 { DataType::F16 } else { DataType::F32 };
        weight.as_slice().at("the weight", context, DataType::I8, bytes)?;
        scales.as_slice().at("the scales", context, of_scales, count)?;
        Ok(Self { context: context.clone(), form, weight, scales, shape })
    }

    /// Returns the bytes that an int4 weight has on the device, from integers `[rows, columns]` of -8 to 7: a byte for
    /// two, 64 bytes for 128 columns of a row. Of these, 16 are of 16 columns of either group of 64; in a word of eight
    /// columns the nibbles i and i + 4 are columns 2 i and 2 i + 1, from a zero point of 8.
    ///
    /// # Errors
    /// [`Error::Length`] for another number of integers; [`Error::Multiple`] for columns that are not a multiple of
    /// 128; [`Error::Dimension`] for an integer out of range.
    pub fn packed_int4(values: &[i8], (rows, columns): (usize, usize)) -> Result<Vec<i8>> {
        expect_multiple("columns", columns, DenseForm::Int4.step())?;
        let (expected, found) = (product(rows, columns)?, values.len());
        if expected != found {
            return Err(Error::Length { what: "the integers", expected, found });
        }
        if let Some(other) = values.iter().find(|value| !(-8..8).contains(*value)) {
            return Err(Error::Dimension {
                what: "the magnitude of an int4",
                size: usize::from(other.unsigned_abs()),
                most: 8,
            });
        }
        let mut packed = vec![];
        for step in values.chunks(DenseForm::Int4.step()) {
            for lane in 0..4 {
                for first in [0, 8, GROUP, GROUP + 8] {
                    let word = &step[first + 16 * lane..][..8];
                    let nibble = |at: usize| (word[at] + 8) as u8;
                    // Bytes i of a word have its nibbles 2 i and 2 i + 1.
                    packed.extend(
                        [[0, 2], [4, 6], [1, 3], [5, 7]].map(|[low, high]| (nibble(low) | nibble(high) << 4) as i8),
                    );
                }
            }
        }
        Ok(packed)
    }

    /// Launches the layer for `x` `[tokens, in_features]` and `y` `[tokens, out_features]`, both of f16 or bf16.
    ///
    /// # Errors
    /// [`Error::DataType`] for another type; [`Error::Length`], [`Error::SliceType`] and [`Error::OtherDevice`] for
    /// tensors that do not fit; [`Error::Pointer`] for an input that does not begin at a multiple of 16 bytes;
    /// [`Error::Driver`].
    pub fn forward(&self, x: DeviceSlice<'_>, tokens: usize, y: DeviceSliceMut<'_>) -> Result<()> {
        let (context, (out_features, in_features), dtype) = (&self.context, self.shape, y.dtype());
        let kernels = DenseProducts::of(context, self.form, dtype)?;
        let x = x.at("the input", context, dtype, product(tokens, in_features)?)?;
        let y = y.at("the result", context, dtype, product(tokens, out_features)?)?;
        if tokens == 0 || out_features == 0 || in_features == 0 {
            return Ok(());
        }
        let weight = self.weight.as_slice().at("the weight", context, DataType::I8, self.weight.len())?;
        let scales = self.scales.as_slice().at("the scales", context, self.scales.dtype(), self.scales.len())?;
        expect_pointers(&[("the input", x, 16), ("the weight", weight, 16), ("the scales", scales, 16)])?;
        let (rows, columns) = (side("out_features", out_features)?, side("in_features", in_features)?);
        for first in (0..tokens).step_by(MAX_TOKENS) {
            let count = side("tokens", MAX_TOKENS.min(tokens - first))?;
            let at = |base: u64, width: usize| base + (first * width * dtype.bytes()) as u64;
            let (x, y) = (at(x, in_features), at(y, out_features));
            let operands = DenseOperands { weight, scales, x, token_scales: 0, bias: 0, y };
            // SAFETY: the slices have been found to be as long as the layer requires, and aligned; the stream is of
            // their device.
            unsafe { kernels.run(context.raw(), (rows, count, columns), operands) }?;
        }
        Ok(())
    }

    /// Returns the number of output features.
    pub fn out_features(&self) -> usize {
        self.shape.0
    }

    /// Returns the number of input features.
    pub fn in_features(&self) -> usize {
        self.shape.1
    }

    /// Returns the bytes of device memory that the layer holds: values and scales.
    pub fn bytes(&self) -> usize {
        self.weight.len() + self.scales.len() * self.scales.dtype().bytes()
    }
}
