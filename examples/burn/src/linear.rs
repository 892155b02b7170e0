//! The 2:4 layer.

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param, ParamId,
};
use burn::nn::Linear;
use burn::tensor::module::linear;
use burn::tensor::{DType, Device, Tensor, TensorData};
use twofour::layer::PackedLinear;
use twofour::{Compressed, DataType};

use crate::weight::{Float, Parts, Weight, for_float};
use crate::{Error, Result};

/// A linear layer `O = IW + b` whose weight is 2:4 along its inputs: in each group of four inputs of an output at most
/// two weights are not zero.
///
/// The weight is held once, packed, on the host. It is frozen: visitors, mappers and records see it as two parameters
/// without gradients, `values` and `meta`, its canonical form, which are made when they are asked for. The bias is a
/// parameter as any other. A clone shares the weight.
///
/// Where a mapper or a record gives a weight that cannot be packed, the layer keeps it, and [`SparseLinear::forward`]
/// returns the reason.
#[derive(Debug, Clone)]
pub struct SparseLinear {
    weight: Weight,
    bias: Option<Param<Tensor<1>>>,
    ids: [ParamId; 2],
    device: Device,
    d_input: usize,
    d_output: usize,
}

impl SparseLinear {
    /// The layer of a compressed weight `[out, in]`, from a file of twofour for instance, and a bias `[out]`.
    ///
    /// # Errors
    /// [`Error::Shape`] for a bias that does not fit.
    pub fn new<T: Float>(weight: Compressed<T>, bias: Option<Tensor<1>>, device: &Device) -> Result<Self> {
        Self::of(Weight::new(weight)?, bias.map(Param::from_tensor), device.clone())
    }

    /// The layer of a dense one that is 2:4 already; it shares the bias.
    ///
    /// # Errors
    /// [`Error::Weight`] with the output (row) and the group of inputs of the first group with three or four non-zeros,
    /// or for a NaN or an infinity; [`Error::DType`] for a weight of another type.
    pub fn from_linear(linear: &Linear) -> Result<Self> {
        Self::of_linear(linear, false)
    }

    /// The layer of a dense one, pruned to the two largest magnitudes of each group; it shares the bias.
    ///
    /// # Errors
    /// [`Error::Weight`] for a NaN or an infinity, with its place; [`Error::DType`] for a weight of another type.
    pub fn pruned(linear: &Linear) -> Result<Self> {
        Self::of_linear(linear, true)
    }

    /// A layer of zeros, to load a record into.
    ///
    /// # Errors
    /// [`Error::Weight`] for sizes beyond what memory addresses.
    pub fn zeros(d_input: usize, d_output: usize, bias: bool, device: &Device) -> Result<Self> {
        let weight = Tensor::<2>::zeros([d_output, d_input], device);
        let bias = bias.then(|| Param::from_tensor(Tensor::zeros([d_output], device)));
        Self::of(Weight::of_dense(weight, false)?, bias, device.clone())
    }

    fn of_linear(linear: &Linear, prune: bool) -> Result<Self> {
        let weight = linear.weight.val();
        let device = weight.device();
        Self::of(Weight::of_dense(weight.transpose(), prune)?, linear.bias.clone(), device)
    }

    fn of(weight: Weight, bias: Option<Param<Tensor<1>>>, device: Device) -> Result<Self> {
        let layer = weight.packed_layer()?;
        let (d_input, d_output) = (layer.in_features(), layer.out_features());
        match bias.as_ref().map(|bias| bias.lazy_shape().as_slice().to_vec()) {
            Some(found) if found != [d_output] => {
                Err(Error::Shape { what: "the bias", found, expected: vec![d_output] })
            }
            _ => Ok(Self { weight, bias, ids: [ParamId::new(), ParamId::new()], device, d_input, d_output }),
        }
    }

    /// Inputs and outputs.
    pub fn dims(&self) -> [usize; 2] {
        [self.d_input, self.d_output]
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Param<Tensor<1>>> {
        self.bias.as_ref()
    }

    /// Bytes of the packed weight, and what its values are.
    ///
    /// # Errors
    /// As [`SparseLinear::forward`], for a weight that could not be packed.
    pub fn packed(&self) -> Result<(usize, Option<DataType>)> {
        self.weight.packed_layer().map(|layer| (layer.bytes(), layer.dtype()))
    }

    /// The dense layer with the same weight, zeros included; it shares the bias.
    ///
    /// # Errors
    /// As [`SparseLinear::forward`], for a weight that could not be packed.
    pub fn to_linear(&self) -> Result<Linear> {
        let weight = Param::from_tensor(self.weight.dense(&self.device)?);
        Ok(Linear { weight, bias: self.bias.clone() })
    }

    /// The output `[.., d_output]` of an input `[.., d_input]`, of the input's type and on its device.
    ///
    /// Kernels of the CPU compute it; from a GPU the input is copied, and the output back. An input with autodiff is
    /// multiplied by burn with the dense weight, so that its gradient is burn's own.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of inputs, [`Error::DType`] for an input of another type; what made the
    /// weight of a record, or of a mapper, no 2:4 weight.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>> {
        let layer = self.weight.packed_layer()?;
        let mut shape = input.dims().to_vec();
        if shape.last() != Some(&self.d_input) {
            let expected = shape.iter().take(D.saturating_sub(1)).copied().chain([self.d_input]).collect();
            return Err(Error::Shape { what: "the input", found: shape, expected });
        }
        let (device, dtype) = (input.device(), input.dtype());
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::DType { what: "the input", found: dtype });
        }
        let bias = self.bias.as_ref().map(|bias| match bias.val() {
            bias if matches!(bias.dtype(), DType::QFloat(_)) => bias.dequantize(),
            bias => bias,
        });
        let bias = bias.map(|bias| bias.to_device(&device).cast(dtype));
        if input.is_autodiff() {
            return Ok(linear(input, self.weight.dense(&device)?.cast(dtype), bias));
        }
        shape[D - 1] = self.d_output;
        let data = input.try_into_data().map_err(Error::read("the input"))?;
        let output = for_float!("the input", dtype, T => multiplied::<T>(layer, data, shape)?);
        let output = Tensor::from_data(output, (&device, dtype));
        Ok(match bias {
            Some(bias) => output + bias.unsqueeze(),
            None => output,
        })
    }

    fn parts(&self) -> Parts {
        let (values, meta) = self.weight.parts(self.ids, &self.device);
        Parts { values, meta, bias: self.bias.clone() }
    }

    fn with(&self, parts: Parts) -> Self {
        let ids = [parts.values.id, parts.meta.id];
        let device = parts.values.lazy_device();
        let weight = Weight::of_parts(parts.values, parts.meta, self.d_input);
        Self { weight, bias: parts.bias, ids, device, ..*self }
    }
}

fn multiplied<T: Float>(layer: &PackedLinear, input: TensorData, shape: Vec<usize>) -> Result<TensorData> {
    let input = input.try_into_vec::<T>().map_err(Error::read("the input"))?;
    let tokens = shape.iter().rev().skip(1).product();
    let mut output = vec![T::ZERO; tokens * layer.out_features()];
    layer.forward(&input, tokens, &mut output)?;
    Ok(TensorData::new(output, shape))
}

impl Module for SparseLinear {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.parts().visit(visitor);
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        self.with(self.parts().map(mapper))
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        self.parts().collect_devices(devices)
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(self.parts().to_device(device))
    }

    fn fork(self, device: &Device) -> Self {
        self.with(self.parts().fork(device))
    }

    fn train(self) -> Self {
        self.with(self.parts().train())
    }

    fn valid(&self) -> Self {
        self.with(self.parts().valid())
    }

    fn materialize(self) -> Self {
        self.with(self.parts().materialize())
    }
}

impl ModuleDisplayDefault for SparseLinear {
    fn content(&self, content: Content) -> Option<Content> {
        content
            .add("d_input", &self.d_input)
            .add("d_output", &self.d_output)
            .add("bias", &self.bias.is_some())
            .optional()
    }
}

impl ModuleDisplay for SparseLinear {}
