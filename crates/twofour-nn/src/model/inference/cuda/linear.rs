//! Linear layers of a model on a GPU.

use twofour::{
    Arithmetic, Compressed, DataType,
    int4::Granularity,
    kernel::{Activation, KernelElement},
};
use twofour_cuda::layer::{DenseLinear, DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext, PackedLinear};
use twofour_transformer::cuda::decode::{DenseInt8Linear, WeightOnlyLinear};

use crate::{
    Error, Result,
    model::{
        file,
        inference::{linear::LinearPart, passes::narrowed, weight::Weight},
    },
};

/// A linear layer `y = x · Wᵀ + bias`: one GEMM, however many weights its file has.
#[derive(Debug)]
pub(in crate::model) struct CudaLinear {
    weight: DeviceWeight,
    outputs: usize,
    inputs: usize,
}

#[derive(Debug)]
enum DeviceWeight {
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

impl CudaLinear {
    /// The layer of these parts, whose output features follow each other, with an activation in the GEMM's epilogue;
    /// and whether the weight's GEMM has one: without it the activation is the caller's.
    pub(in crate::model) fn new<T: KernelElement>(
        context: &LayerContext,
        parts: Vec<LinearPart<T>>,
        activation: Activation,
    ) -> Result<(Self, bool)> {
        let LinearPart { weight, bias, outputs, inputs } = joined(parts)?;
        let narrow = || -> Result<Option<DeviceBuffer>> {
            let bias = bias.as_deref().map(narrowed::<T>);
            Ok(bias.map(|bias| DeviceBuffer::from_host(context, &bias)).transpose()?)
        };
        let floats = bias.as_deref();
        let weight = match weight {
            Weight::Sparse(weight) => DeviceWeight::Packed(PackedLinear::new(context, &weight, floats, activation)?),
            Weight::Int8(weight) => {
                let (weight, scales) = weight.into_parts();
                DeviceWeight::Packed(PackedLinear::scaled(context, &weight, &scales, floats, activation, T::DTYPE)?)
            }
            Weight::Int4(weight) => {
                DeviceWeight::Packed(PackedLinear::int4(context, &weight, floats, activation, T::DTYPE)?)
            }
            Weight::DenseInt8 { values, scales } => {
                let [values, scales] =
                    [DeviceBuffer::from_host(context, &values)?, DeviceBuffer::from_host(context, &scales)?];
                let layer = DenseInt8Linear::new(context, (outputs, inputs), values, scales, narrow()?)?;
                DeviceWeight::DenseInt8(layer)
            }
            dense => {
                let weight = DeviceBuffer::from_host(context, &into_dense(dense))?;
                DeviceWeight::Dense { weight, bias: narrow()? }
            }
        };
        let activates = matches!(weight, DeviceWeight::Packed(_)) && activation != Activation::Identity;
        Ok((CudaLinear { weight, outputs, inputs }, activates))
    }

    /// A dense layer of a weight on the device, without a bias.
    pub(in crate::model) fn dense(weight: DeviceBuffer, (outputs, inputs): (usize, usize)) -> Self {
        CudaLinear { weight: DeviceWeight::Dense { weight, bias: None }, outputs, inputs }
    }

    /// A 2:4 layer.
    pub(in crate::model) fn packed(layer: PackedLinear) -> Self {
        let (outputs, inputs) = (layer.out_features(), layer.in_features());
        CudaLinear { weight: DeviceWeight::Packed(layer), outputs, inputs }
    }

    /// A dense layer in 8-bit integers.
    pub(in crate::model) fn dense_int8(layer: DenseInt8Linear, (outputs, inputs): (usize, usize)) -> Self {
        CudaLinear { weight: DeviceWeight::DenseInt8(layer), outputs, inputs }
    }

    /// A dense layer whose weight alone is quantized.
    pub(super) fn weight_only(layer: WeightOnlyLinear) -> Self {
        let (outputs, inputs) = (layer.out_features(), layer.in_features());
        CudaLinear { weight: DeviceWeight::DenseMixed(layer), outputs, inputs }
    }

    /// Whether the input is quantized.
    pub(in crate::model) fn takes_integers(&self) -> bool {
        match &self.weight {
            DeviceWeight::Dense { .. } | DeviceWeight::DenseMixed(_) => false,
            DeviceWeight::DenseInt8(_) => true,
            // int4 packs bytes too, but its input is not quantized.
            DeviceWeight::Packed(layer) => layer.takes_quantized(),
        }
    }

    /// The weight's values, where it is dense.
    pub(in crate::model) fn dense_values(&self) -> Option<&DeviceBuffer> {
        match &self.weight {
            DeviceWeight::Dense { weight, .. } => Some(weight),
            _ => None,
        }
    }

    /// Whether the outputs have a bias, where the weight is dense.
    pub(super) fn has_bias(&self) -> bool {
        matches!(self.weight, DeviceWeight::Dense { bias: Some(_), .. })
    }

    /// Launches the products of `x` `[tokens, inputs]` and a dense weight, without the bias, to `y`.
    pub(super) fn products(
        &self,
        context: &LayerContext,
        x: DeviceSlice<'_>,
        tokens: usize,
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let DeviceWeight::Dense { weight, .. } = &self.weight else {
            return Err(Error::Unsupported {
                engine: "CUDA inference",
                what: "products of a packed weight without its bias".into(),
                remedy: "compute in f32, where all weights are dense",
            });
        };
        let shape = DenseLinear { out_features: self.outputs, in_features: self.inputs };
        Ok(shape.forward(context, (x, tokens), weight.as_slice(), None, y)?)
    }

    /// Launches the layer for `x` `[tokens, inputs]` and `y` `[tokens, outputs]`. An int8 layer quantizes floats
    /// itself.
    pub(in crate::model) fn forward(
        &self,
        context: &LayerContext,
        x: Input<'_>,
        tokens: usize,
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        match (&self.weight, x) {
            (DeviceWeight::Dense { weight, bias }, Input::Floats(x)) => {
                let shape = DenseLinear { out_features: self.outputs, in_features: self.inputs };
                let bias = bias.as_ref().map(DeviceBuffer::as_slice);
                shape.forward(context, (x, tokens), weight.as_slice(), bias, y)?;
            }
            (DeviceWeight::Packed(layer), Input::Floats(x)) => layer.forward(x, tokens, y)?,
            (DeviceWeight::Packed(layer), Input::Integers(x, scales)) => {
                layer.forward_quantized((x, scales), tokens, y)?
            }
            (DeviceWeight::DenseInt8(layer), Input::Integers(x, scales)) => {
                layer.forward_quantized((x, scales), tokens, y)?
            }
            (DeviceWeight::DenseInt8(layer), Input::Floats(x)) => layer.forward(x, tokens, y)?,
            (DeviceWeight::DenseMixed(layer), Input::Floats(x)) => layer.forward(x, tokens, y)?,
            (DeviceWeight::Dense { .. } | DeviceWeight::DenseMixed(_), Input::Integers(..)) => {
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
            DeviceWeight::Dense { weight, .. } => weight.len() * weight.dtype().bytes(),
            DeviceWeight::Packed(layer) => layer.bytes(),
            DeviceWeight::DenseInt8(layer) => layer.bytes(),
            DeviceWeight::DenseMixed(layer) => layer.bytes(),
        }
    }
}

/// One part of the rows of all: in their form where kernels of the GPU have it and all have one, otherwise dense.
fn joined<T: KernelElement>(parts: Vec<LinearPart<T>>) -> Result<LinearPart<T>> {
    let has_bias = parts.iter().any(|part| part.bias.is_some());
    let formed = |part: LinearPart<T>| -> Result<LinearPart<T>> {
        let bias = has_bias.then(|| part.bias.unwrap_or_else(|| vec![0.0; part.outputs]));
        Ok(LinearPart { weight: formed(part.weight, (part.outputs, part.inputs))?, bias, ..part })
    };
    let mut parts = parts.into_iter().map(formed).collect::<Result<Vec<_>>>()?;
    if !parts.windows(2).all(|pair| pair[0].is_like(&pair[1])) {
        let dense = |part: LinearPart<T>| LinearPart { weight: Weight::Dense(into_dense(part.weight)), ..part };
        parts = parts.into_iter().map(dense).collect();
    }
    let mut parts = parts.into_iter();
    let mut whole = parts.next().ok_or_else(|| Error::Setting {
        what: "the weights of a layer",
        found: "none".into(),
        expected: "one or more",
    })?;
    parts.try_for_each(|part| whole.append(part))?;
    Ok(whole)
}

/// The weight `[outputs, inputs]` in a form that kernels of the GPU have: in f32 all are dense.
fn formed<T: KernelElement>(weight: Weight<T>, (outputs, inputs): (usize, usize)) -> Result<Weight<T>> {
    Ok(match weight {
        weight if T::DTYPE == DataType::F32 => Weight::Dense(into_dense(weight)),
        Weight::F32(weight) => Weight::Sparse(converted(weight)?),
        Weight::Bf16(weight) => Weight::Sparse(converted(weight)?),
        Weight::F16(weight) => Weight::Sparse(converted(weight)?),
        Weight::Int8(weight) if weight.granularity() != Granularity::Row => {
            Weight::Sparse(converted(weight.dequantize())?)
        }
        Weight::Int4(weight) if weight.granularity() == Granularity::Group64 => {
            Weight::Sparse(converted(weight.dequantize())?)
        }
        // What the GEMM of dense integers requires.
        Weight::DenseInt8 { values, scales } if !outputs.is_multiple_of(4) || !inputs.is_multiple_of(4) => {
            Weight::Dense(narrowed(&file::dequantized((values, scales))))
        }
        other => other,
    })
}

fn converted<S: Arithmetic, T: Arithmetic>(weight: Compressed<S>) -> Result<Compressed<T>> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let (values, meta) = weight.into_parts();
    let values = values.into_iter().map(|value| T::from_f32(value.to_f32())).collect();
    Ok(Compressed::from_parts(rows, cols, values, meta)?)
}

/// The values of a weight, dense.
pub(super) fn into_dense<T: KernelElement>(weight: Weight<T>) -> Vec<T> {
    match weight {
        Weight::Dense(values) => values,
        Weight::Sparse(weight) => weight.to_dense(),
        Weight::DenseInt8 { values, scales } => narrowed(&file::dequantized((values, scales))),
        Weight::F32(weight) => narrowed(&weight.to_dense()),
        Weight::Bf16(weight) => weight.to_dense().into_iter().map(|value| T::from_f32(value.to_f32())).collect(),
        Weight::F16(weight) => weight.to_dense().into_iter().map(|value| T::from_f32(value.to_f32())).collect(),
        Weight::Int8(weight) => narrowed(&weight.dequantize().to_dense()),
        Weight::Int4(weight) => narrowed(&weight.dequantize().to_dense()),
    }
}
