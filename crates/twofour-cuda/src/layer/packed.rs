//! The layer for inference.

use half::{bf16, f16};
use twofour::{
    Compressed, Element, MatrixRef,
    int4::{Granularity, Int4},
    kernel::quantize,
};

use super::{
    DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext,
    dense::unpacked_product,
    elements,
    host_form::encode,
    int4::{Int4Place, encode as encode_int4, int4_linear},
    quantized::quantized_linear,
    weight::PackedBuffer,
};
use crate::{Activation, DataType, Error, Result, problem::GemmProblem, raw::gemm::Epilogue};

/// A 2:4 linear layer for inference in device memory, `y = activation(x · Wᵀ + bias)`, packed once. Activations are of
/// f16 or bf16.
///
/// | weight | activations in the GEMM |
/// |---|---|
/// | f16, bf16 | as they are |
/// | 8-bit floats, a scale for each row | quantized with one scale for each call, on the device |
/// | 8-bit integers, a scale for each row | quantized with a scale for each token, on the device |
/// | int4, scales for rows or groups | as they are |
///
/// An int4 weight multiplies up to 256 tokens 64 at a time. More are multiplied with the weight's floats, which are
/// computed once.
///
/// From 512 tokens on, the GEMM of floats or int4 is a dense one with the weight unpacked to the context's workspace
/// where the first call for a shape measures that to be faster.
#[derive(Debug)]
pub struct PackedLinear {
    context: LayerContext,
    weight: PackedWeight,
    bias: Option<DeviceBuffer>,
    activation: Activation,
    dtype: DataType,
    out_features: usize,
    in_features: usize,
}

/// The form of the weight.
#[derive(Debug)]
pub(super) enum PackedWeight {
    /// A weight of the activations' type.
    Float(PackedBuffer),
    /// An 8-bit weight, with a scale for each row.
    Scaled { dtype: DataType, weight: PackedBuffer, scales: DeviceBuffer },
    /// Bytes of values, metadata and scales.
    Int4 { granularity: Granularity, bytes: DeviceBuffer },
}

impl PackedLinear {
    /// Packs a compressed weight `[out_features, in_features]` of f16 or bf16, with a bias `[out_features]`;
    /// activations are of the same type.
    ///
    /// # Errors
    /// [`Error::DataType`] for another type, [`Error::Length`] for a bias of another length, [`Error::OutOfMemory`],
    /// [`Error::Driver`].
    pub fn new<T: Element>(
        context: &LayerContext,
        weight: &Compressed<T>,
        bias: Option<&[f32]>,
        activation: Activation,
    ) -> Result<Self> {
        let (dtype, shape) = (T::DTYPE, (weight.rows(), weight.cols()));
        let weight = PackedWeight::Float(upload(context, weight)?);
        Self::with(context, weight, shape, bias, activation, dtype)
    }

    /// Packs a compressed weight of 8-bit integers or floats with a scale for each row; activations are of `dtype`, f16
    /// or bf16.
    ///
    /// # Errors
    /// [`Error::DataType`] for another type, [`Error::Length`] for scales or a bias of another length,
    /// [`Error::Unsupported`] for 8-bit floats before compute capability 8.9, [`Error::OutOfMemory`],
    /// [`Error::Driver`].
    pub fn scaled<T: Element>(
        context: &LayerContext,
        weight: &Compressed<T>,
        scales: &[f32],
        bias: Option<&[f32]>,
        activation: Activation,
        dtype: DataType,
    ) -> Result<Self> {
        let of: DataType = T::DTYPE;
        if of.bytes() != 1 {
            let operation = "a weight with a scale for each row";
            return Err(Error::DataType { operation, dtype: of, supported: "i8, e4m3, e5m2" });
        }
        expect_length("the scales", weight.rows(), scales.len())?;
        let shape = (weight.rows(), weight.cols());
        let scales = DeviceBuffer::from_host(context, scales)?;
        let weight = PackedWeight::Scaled { dtype: of, weight: upload(context, weight)?, scales };
        Self::with(context, weight, shape, bias, activation, dtype)
    }

    /// Quantizes a compressed weight to 8-bit integers, symmetrically and with a scale for each row, and packs it.
    ///
    /// # Errors
    /// [`Error::Core`] with the index of a NaN or an infinity; those of [`PackedLinear::scaled`].
    pub fn quantized<T: Element>(
        context: &LayerContext,
        weight: &Compressed<T>,
        bias: Option<&[f32]>,
        activation: Activation,
        dtype: DataType,
    ) -> Result<Self> {
        let (rows, cols) = (weight.rows(), weight.cols());
        let dense: Vec<f32> = weight.to_dense().iter().map(|v| v.to_f32()).collect();
        let (values, scales) = quantize(MatrixRef::new(rows, cols, &dense)?)?;
        // Uses the weight's own metadata, so that a value that becomes zero stays a kept one.
        let values = Compressed::from_masked(MatrixRef::new(rows, cols, &values)?, &weight.mask())?;
        Self::scaled(context, &values, &scales, bias, activation, dtype)
    }

    /// Packs an int4 weight; activations are of `dtype`, f16 or bf16.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; those of [`PackedLinear::scaled`].
    pub fn int4(
        context: &LayerContext,
        weight: &Int4,
        bias: Option<&[f32]>,
        activation: Activation,
        dtype: DataType,
    ) -> Result<Self> {
        let shape = (weight.weight().rows(), weight.weight().cols());
        let bytes = DeviceBuffer::from_host(context, bytemuck::cast_slice::<u8, i8>(&encode_int4(weight)?))?;
        let weight = PackedWeight::Int4 { granularity: weight.granularity(), bytes };
        Self::with(context, weight, shape, bias, activation, dtype)
    }

    pub(super) fn with(
        context: &LayerContext,
        weight: PackedWeight,
        (out_features, in_features): (usize, usize),
        bias: Option<&[f32]>,
        activation: Activation,
        dtype: DataType,
    ) -> Result<Self> {
        let bias = match (bias, dtype) {
            (Some(bias), _) if bias.len() != out_features => {
                return Err(Error::Length { what: "the bias", expected: out_features, found: bias.len() });
            }
            (bias, DataType::F16) => bias.map(|bias| convert::<f16>(context, bias)).transpose()?,
            (bias, DataType::BF16) => bias.map(|bias| convert::<bf16>(context, bias)).transpose()?,
            _ => {
                let operation = "a 2:4 layer for inference";
                return Err(Error::DataType { operation, dtype, supported: "f16, bf16" });
            }
        };
        Ok(Self { context: context.clone(), weight, bias, activation, dtype, out_features, in_features })
    }

    /// Launches `y = activation(x · Wᵀ + bias)` for `x` `[tokens, in_features]` and `y` `[tokens, out_features]`. The
    /// GEMM accumulates in f32; for integers it is exact.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::SliceType`] and [`Error::OtherDevice`] for a slice with another length, type or
    /// device; [`Error::Capturing`] where a plan is missing while the stream is captured: one call with the same number
    /// of tokens before the capture plans it.
    pub fn forward(&self, x: DeviceSlice<'_>, tokens: usize, y: DeviceSliceMut<'_>) -> Result<()> {
        let (context, dtype) = (&self.context, self.dtype);
        let inputs = elements(tokens, self.in_features)?;
        let x = x.expect("the input", context, dtype, inputs)?;
        let y = y.expect("the output", context, dtype, elements(tokens, self.out_features)?)?;
        if tokens == 0 || self.out_features == 0 || self.in_features == 0 {
            return Ok(());
        }
        let bias = match &self.bias {
            Some(bias) => Some(bias.expect("the bias", context, dtype, self.out_features)?),
            None => None,
        };
        let epilogue = Epilogue { bias, activation: self.activation, ..Epilogue::default() };
        match &self.weight {
            PackedWeight::Float(weight) => {
                let problem = GemmProblem::plain(dtype, dtype, self.out_features, tokens, self.in_features);
                super::forward::linear(context, problem, weight.packed(), x, epilogue, y)
            }
            PackedWeight::Scaled { dtype: of, weight, scales } => {
                let scales = scales.expect("the scales", context, DataType::F32, self.out_features)?;
                let problem = GemmProblem::plain(*of, dtype, self.out_features, tokens, self.in_features);
                let epilogue = Epilogue { feature_scales: Some(scales), ..epilogue };
                quantized_linear(context, problem, weight.packed(), (x, dtype), epilogue, y)
            }
            PackedWeight::Int4 { granularity, bytes } => {
                let address = bytes.expect("the weight", context, DataType::I8, bytes.len())?;
                let weight = Int4Place::at(address, (self.out_features, self.in_features), *granularity)?;
                int4_linear(context, weight, (x, dtype, tokens), epilogue, y)
            }
        }
    }

    /// Launches `y = activation(x · Wᵀ + bias)` for a weight of 8-bit integers and tokens that are quantized already:
    /// i8 `values` `[tokens, in_features]` with f32 `scales` `[tokens]`, as `normalize_tokens` of `twofour-transformer`
    /// writes them. The results are those of [`PackedLinear::forward`] for the values before their quantization.
    ///
    /// # Errors
    /// [`Error::DataType`] for another weight; those of [`PackedLinear::forward`].
    pub fn forward_quantized(
        &self,
        (values, scales): (DeviceSlice<'_>, DeviceSlice<'_>),
        tokens: usize,
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (context, dtype) = (&self.context, self.dtype);
        let PackedWeight::Scaled { dtype: of @ DataType::I8, weight, scales: of_features } = &self.weight else {
            let operation = "a layer with quantized tokens";
            return Err(Error::DataType { operation, dtype: self.weight_dtype(), supported: "i8 with scales" });
        };
        let x = values.expect("the input", context, *of, elements(tokens, self.in_features)?)?;
        let token_scales = scales.expect("the scales of the input", context, DataType::F32, tokens)?;
        let y = y.expect("the output", context, dtype, elements(tokens, self.out_features)?)?;
        if tokens == 0 || self.out_features == 0 || self.in_features == 0 {
            return Ok(());
        }
        let bias = self.bias.as_ref().map(|bias| bias.expect("the bias", context, dtype, self.out_features));
        let epilogue = Epilogue {
            bias: bias.transpose()?,
            activation: self.activation,
            feature_scales: Some(of_features.expect("the scales", context, DataType::F32, self.out_features)?),
            token_scales: Some(token_scales),
            ..Epilogue::default()
        };
        let problem = GemmProblem::plain(*of, dtype, self.out_features, tokens, self.in_features);
        super::forward::linear(context, problem, weight.packed(), x, epilogue, y)
    }

    /// Launches `dx = dy · W` for the gradient `dy` `[tokens, out_features]` of the pre-activation and `dx` `[tokens,
    /// in_features]`. This is a dense GEMM with the weight, which every call unpacks.
    ///
    /// # Errors
    /// [`Error::DataType`] for a weight of another type than the activations, [`Error::NoLibrary`] where cuBLASLt is
    /// not installed; those of [`PackedLinear::forward`].
    pub fn input_gradient(&self, dy: DeviceSlice<'_>, tokens: usize, dx: DeviceSliceMut<'_>) -> Result<()> {
        let (context, dtype) = (&self.context, self.dtype);
        let PackedWeight::Float(weight) = &self.weight else {
            let operation = "the input gradient of a packed layer";
            return Err(Error::DataType { operation, dtype: self.weight_dtype(), supported: "f16, bf16" });
        };
        let dy = dy.expect("the output gradient", context, dtype, elements(tokens, self.out_features)?)?;
        let dx = dx.expect("the input gradient", context, dtype, elements(tokens, self.in_features)?)?;
        let shape = (self.out_features, self.in_features);
        unpacked_product(context, (weight.packed(), shape, dtype), (dy, tokens), dx)
    }

    /// Returns the number of output features.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Returns the number of input features.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Returns the data type of activations.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// Returns the data type of the packed values; for int4 that of bytes, i8.
    pub fn weight_dtype(&self) -> DataType {
        match &self.weight {
            PackedWeight::Float(_) => self.dtype,
            PackedWeight::Scaled { dtype, .. } => *dtype,
            PackedWeight::Int4 { .. } => DataType::I8,
        }
    }

    /// Returns whether the weight is of 8-bit integers with scales, so that [`PackedLinear::forward_quantized`] takes
    /// its input.
    pub fn takes_quantized(&self) -> bool {
        matches!(self.weight, PackedWeight::Scaled { dtype: DataType::I8, .. })
    }

    /// Returns the bytes of device memory that the layer holds: values, metadata, scales and bias.
    pub fn bytes(&self) -> usize {
        let buffer = |buffer: &DeviceBuffer| buffer.len() * buffer.dtype().bytes();
        let weight = match &self.weight {
            PackedWeight::Float(weight) => weight.bytes(),
            PackedWeight::Scaled { weight, scales, .. } => weight.bytes() + buffer(scales),
            PackedWeight::Int4 { bytes, .. } => buffer(bytes),
        };
        weight + self.bias.as_ref().map_or(0, buffer)
    }

    /// Returns the weight in canonical form, as a copy in host memory; synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::SliceType`] where its values have another type, [`Error::Driver`].
    pub fn to_compressed<T: Element>(&self) -> Result<Compressed<T>> {
        match &self.weight {
            PackedWeight::Float(weight) | PackedWeight::Scaled { weight, .. } => weight.to_compressed(&self.context),
            PackedWeight::Int4 { .. } => {
                let (expected, found) = (DataType::I8, T::DTYPE);
                Err(Error::SliceType { what: "the packed weight of four-bit integers", expected, found })
            }
        }
    }
}

fn expect_length(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}

/// Returns floats, rounded to `T`, in device memory.
fn convert<T: twofour::Arithmetic>(context: &LayerContext, values: &[f32]) -> Result<DeviceBuffer> {
    DeviceBuffer::from_host(context, &values.iter().map(|v| T::from_f32(*v)).collect::<Vec<_>>())
}

/// Packs a weight in host memory and copies it to the device.
fn upload<T: Element>(context: &LayerContext, weight: &Compressed<T>) -> Result<PackedBuffer> {
    let mut buffer = PackedBuffer::new(context, T::DTYPE, weight.rows(), weight.cols())?;
    let (values, meta) = encode(weight)?;
    buffer.write(context, &values, &meta)?;
    Ok(buffer)
}
