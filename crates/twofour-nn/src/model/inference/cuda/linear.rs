//! Linear layers of a model on a GPU.

use twofour::{
    DataType,
    kernel::{Activation, KernelElement},
};
use twofour_cuda::layer::{DenseLinear, DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext, PackedLinear};
use twofour_transformer::cuda::decode::{DenseInt8Linear, WeightOnlyLinear};

use crate::{
    Error, Result,
    model::inference::stored::{StoredPart, StoredWeight, concatenated},
};

/// A linear layer `y = x · Wᵀ + bias`: one GEMM, however many weights its file has.
#[derive(Debug)]
pub(in crate::model) struct CudaLinear {
    weight: Weight,
    outputs: usize,
    inputs: usize,
}

#[derive(Debug)]
enum Weight {
    Dense {
        weight: DeviceBuffer,
        bias: Option<DeviceBuffer>,
    },
    Packed(PackedLinear),
    DenseInt8(DenseInt8Linear),
    /// Dense integers, with floats as input.
    DenseMixed(WeightOnlyLinear),
}

/// The input of a linear layer.
#[derive(Debug, Clone, Copy)]
pub(in crate::model) enum Input<'a> {
    /// `[tokens, inputs]` of the type to compute in.
    Floats(DeviceSlice<'a>),
    /// i8 `[tokens, inputs]` with a scale for each token.
    Integers(DeviceSlice<'a>, DeviceSlice<'a>),
}

fn up<T: KernelElement>(context: &LayerContext, values: &[f32]) -> Result<DeviceBuffer> {
    let values: Vec<T> = values.iter().map(|value| T::from_f32(*value)).collect();
    Ok(DeviceBuffer::from_host(context, &values)?)
}

impl CudaLinear {
    /// The layer of these parts, whose output features follow each other.
    pub(in crate::model) fn new<T: KernelElement>(
        context: &LayerContext,
        parts: Vec<StoredPart<T>>,
        shape: (usize, usize),
    ) -> Result<Self> {
        Ok(Self::before_activation(context, parts, shape, Activation::Identity)?.0)
    }

    /// [`CudaLinear::new`] with an activation in the GEMM's epilogue, and whether the weight's GEMM has one: without it
    /// the activation is the caller's.
    pub(in crate::model) fn before_activation<T: KernelElement>(
        context: &LayerContext,
        parts: Vec<StoredPart<T>>,
        (outputs, inputs): (usize, usize),
        activation: Activation,
    ) -> Result<(Self, bool)> {
        let has_bias = parts.iter().any(|part| part.bias.is_some());
        let bias: Vec<f32> =
            parts.iter().flat_map(|part| part.bias.clone().unwrap_or_else(|| vec![0.0; part.outputs])).collect();
        let bias = has_bias.then_some(bias.as_slice());
        let weights = parts.into_iter().map(|part| part.weight).collect();
        let weight = concatenated(weights, (outputs, inputs))?;
        if T::DTYPE == DataType::F32 && !matches!(weight, StoredWeight::Dense(_)) {
            return Err(Error::Unsupported {
                engine: "CUDA inference",
                what: "2:4 weights in f32".into(),
                remedy: "compute in bf16 or f16",
            });
        }
        let weight = match weight {
            StoredWeight::Dense(values) => Weight::Dense {
                weight: DeviceBuffer::from_host(context, &values)?,
                bias: bias.map(|bias| up::<T>(context, bias)).transpose()?,
            },
            StoredWeight::Compressed(weight) => Weight::Packed(PackedLinear::new(context, &weight, bias, activation)?),
            StoredWeight::Int8(weight, scales) => {
                Weight::Packed(PackedLinear::scaled(context, &weight, &scales, bias, activation, T::DTYPE)?)
            }
            StoredWeight::DenseInt8(values, scales) => {
                let (weight, scales) =
                    (DeviceBuffer::from_host(context, &values)?, DeviceBuffer::from_host(context, &scales)?);
                let bias = bias.map(|bias| up::<T>(context, bias)).transpose()?;
                Weight::DenseInt8(DenseInt8Linear::new(context, (outputs, inputs), weight, scales, bias)?)
            }
            StoredWeight::Int4(weight) => {
                Weight::Packed(PackedLinear::int4(context, &weight, bias, activation, T::DTYPE)?)
            }
        };
        let activates = matches!(weight, Weight::Packed(_)) && activation != Activation::Identity;
        Ok((CudaLinear { weight, outputs, inputs }, activates))
    }

    /// A dense layer of a weight on the device, without a bias.
    pub(in crate::model) fn dense(weight: DeviceBuffer, (outputs, inputs): (usize, usize)) -> Self {
        CudaLinear { weight: Weight::Dense { weight, bias: None }, outputs, inputs }
    }

    /// A 2:4 layer.
    pub(in crate::model) fn packed(layer: PackedLinear) -> Self {
        let (outputs, inputs) = (layer.out_features(), layer.in_features());
        CudaLinear { weight: Weight::Packed(layer), outputs, inputs }
    }

    /// A dense layer in 8-bit integers.
    pub(in crate::model) fn dense_int8(layer: DenseInt8Linear, (outputs, inputs): (usize, usize)) -> Self {
        CudaLinear { weight: Weight::DenseInt8(layer), outputs, inputs }
    }

    /// A dense layer whose weight alone is quantized.
    pub(super) fn weight_only(layer: WeightOnlyLinear) -> Self {
        let (outputs, inputs) = (layer.out_features(), layer.in_features());
        CudaLinear { weight: Weight::DenseMixed(layer), outputs, inputs }
    }

    /// Whether the input is quantized.
    pub(in crate::model) fn takes_integers(&self) -> bool {
        match &self.weight {
            Weight::Dense { .. } | Weight::DenseMixed(_) => false,
            Weight::DenseInt8(_) => true,
            // int4 packs bytes too, but its input is not quantized.
            Weight::Packed(layer) => layer.takes_quantized(),
        }
    }

    /// The weight's values, where it is dense.
    pub(in crate::model) fn dense_values(&self) -> Option<&DeviceBuffer> {
        match &self.weight {
            Weight::Dense { weight, .. } => Some(weight),
            _ => None,
        }
    }

    /// Launches the layer for `x` `[tokens, inputs]` and `y` `[tokens, outputs]`.
    pub(in crate::model) fn forward(
        &self,
        context: &LayerContext,
        x: Input<'_>,
        tokens: usize,
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        match (&self.weight, x) {
            (Weight::Dense { weight, bias }, Input::Floats(x)) => {
                let shape = DenseLinear { out_features: self.outputs, in_features: self.inputs };
                let bias = bias.as_ref().map(DeviceBuffer::as_slice);
                shape.forward(context, (x, tokens), weight.as_slice(), bias, y)?;
            }
            (Weight::Packed(layer), Input::Floats(x)) => layer.forward(x, tokens, y)?,
            (Weight::Packed(layer), Input::Integers(x, scales)) => layer.forward_quantized((x, scales), tokens, y)?,
            (Weight::DenseInt8(layer), Input::Integers(x, scales)) => {
                layer.forward_quantized((x, scales), tokens, y)?
            }
            (Weight::DenseInt8(layer), Input::Floats(x)) => layer.forward(x, tokens, y)?,
            (Weight::DenseMixed(layer), Input::Floats(x)) => layer.forward(x, tokens, y)?,
            (Weight::Dense { .. } | Weight::DenseMixed(_), Input::Integers(..)) => {
                return Err(Error::Unsupported {
                    engine: "CUDA inference",
                    what: "a layer of floats with an input of integers".into(),
                    remedy: "quantize the input only where the layer takes integers",
                });
            }
        }
        Ok(())
    }

    /// Bytes of the weight.
    pub(in crate::model) fn bytes(&self) -> usize {
        match &self.weight {
            Weight::Dense { weight, .. } => weight.len() * weight.dtype().bytes(),
            Weight::Packed(layer) => layer.bytes(),
            Weight::DenseInt8(layer) => layer.bytes(),
            Weight::DenseMixed(layer) => layer.bytes(),
        }
    }
}
