//! The layers of a model for inference.

use half::{bf16, f16};
use twofour::{
    Arithmetic, DataType, MatrixRef,
    file::{Reader, ValueFormat},
    kernel::{Activation, DenseWeight, Epilogue, KernelElement, SparseWeight},
    layer::PackedLinear,
};

use super::file;
use crate::{
    Result,
    block::LayerNorm,
    cpu::layer_norm,
    engine::{Engine, cpu::CpuEngine},
    linear,
    model::gpt::has_bias,
};

/// Attention and feed-forward block.
#[derive(Debug)]
pub(super) struct Layer<T: KernelElement> {
    pub(super) attention_norm: Norm,
    pub(super) qkv: Linear<T>,
    pub(super) out: Linear<T>,
    pub(super) feed_forward_norm: Norm,
    pub(super) up: Linear<T>,
    pub(super) down: Linear<T>,
}

impl<T: KernelElement> Layer<T> {
    /// Bytes of the linear layers' weights.
    pub(super) fn bytes(&self) -> usize {
        self.qkv.bytes() + self.out.bytes() + self.up.bytes() + self.down.bytes()
    }
}

/// Layer normalization.
#[derive(Debug)]
pub(super) struct Norm {
    gain: Vec<f32>,
    bias: Vec<f32>,
}

impl Norm {
    pub(super) fn new(gain: Vec<f32>, bias: Vec<f32>) -> Self {
        Norm { gain, bias }
    }

    pub(super) fn forward<T: Arithmetic>(&self, x: &[f32]) -> Vec<T> {
        let rows = x.len() / self.gain.len().max(1);
        let (mut y, mut mean, mut rstd) = (vec![0f32; x.len()], vec![0f32; rows], vec![0f32; rows]);
        let epsilon = LayerNorm::<CpuEngine>::EPSILON;
        layer_norm::forward(x, [&self.gain, &self.bias], epsilon, &mut y, [&mut mean, &mut rstd]);
        y.into_iter().map(T::from_f32).collect()
    }
}

/// A linear layer with its packed weight.
#[derive(Debug)]
pub(super) struct Linear<T: KernelElement> {
    weight: Weight<T>,
    bias: Option<Vec<f32>>,
    outputs: usize,
}

#[derive(Debug)]
enum Weight<T: KernelElement> {
    Dense(DenseWeight<T>),
    Sparse(SparseWeight<T>),
    /// A weight that was compressed in its file, in whatever data type; it brings its bias with it.
    Packed(PackedLinear),
}

impl<T: KernelElement> Linear<T> {
    /// A layer of a model in memory.
    pub(super) fn new<E: Engine>(engine: &E, linear: &linear::Linear<E>) -> Result<Self> {
        let (outputs, inputs) = (linear.out_features(), linear.in_features());
        let weight = match linear.sparse() {
            Some(_) => Weight::Sparse(SparseWeight::pack(file::compressed(engine, linear)?)?),
            None => Weight::dense(engine.read(linear.weight().master())?, outputs, inputs)?,
        };
        let bias = linear.bias().map(|bias| engine.read(bias.master())).transpose()?;
        Ok(Linear { weight, bias, outputs })
    }

    /// The layer of that name in a model's file.
    pub(super) fn from_file(reader: &Reader, name: &str, (outputs, inputs): (usize, usize)) -> Result<Self> {
        let weight = format!("{name}.weight");
        let bias = match has_bias(name) {
            false => None,
            true => Some(file::plain(reader, &format!("{name}.bias"), &[outputs])?),
        };
        if file::is_compressed(reader, &weight) {
            let weight = Weight::Packed(packed(reader, &weight, [outputs, inputs], bias)?);
            return Ok(Linear { weight, bias: None, outputs });
        }
        let weight = Weight::dense(file::plain(reader, &weight, &[outputs, inputs])?, outputs, inputs)?;
        Ok(Linear { weight, bias, outputs })
    }

    /// `activation(x · Wᵀ + bias)`, `[tokens, outputs]`, for `x: [tokens, inputs]`.
    pub(super) fn forward(&self, x: &[T], tokens: usize, activation: Activation) -> Result<Vec<T>> {
        let mut y = vec![T::ZERO; tokens * self.outputs];
        let epilogue = Epilogue { bias: self.bias.as_deref(), activation };
        match &self.weight {
            Weight::Dense(weight) => weight.linear(x, tokens, epilogue, &mut y)?,
            Weight::Sparse(weight) => weight.linear(x, tokens, epilogue, &mut y)?,
            Weight::Packed(layer) => layer.forward_with(x, tokens, activation, &mut y)?,
        }
        Ok(y)
    }

    /// Bytes of the weight.
    pub(super) fn bytes(&self) -> usize {
        match &self.weight {
            Weight::Dense(weight) => weight.bytes(),
            Weight::Sparse(weight) => weight.bytes(),
            Weight::Packed(layer) => layer.bytes(),
        }
    }
}

impl<T: KernelElement> Weight<T> {
    fn dense(values: Vec<f32>, outputs: usize, inputs: usize) -> Result<Self> {
        let values: Vec<T> = values.into_iter().map(T::from_f32).collect();
        Ok(Weight::Dense(DenseWeight::pack(MatrixRef::new(outputs, inputs, &values)?)?))
    }
}

/// A compressed weight of a file with its bias, in the file's data type.
fn packed(reader: &Reader, name: &str, shape: [usize; 2], bias: Option<Vec<f32>>) -> Result<PackedLinear> {
    let format = file::compressed_format(reader, name, shape)?;
    let activation = Activation::Identity;
    Ok(match format {
        ValueFormat::Plain(DataType::F32) => PackedLinear::new(reader.compressed::<f32>(name)?, bias, activation)?,
        ValueFormat::Plain(DataType::BF16) => PackedLinear::new(reader.compressed::<bf16>(name)?, bias, activation)?,
        ValueFormat::Plain(DataType::F16) => PackedLinear::new(reader.compressed::<f16>(name)?, bias, activation)?,
        ValueFormat::ScaledI8 | ValueFormat::GroupedI8(_) => {
            PackedLinear::new_int8(reader.int8(name)?, bias, activation)?
        }
        ValueFormat::Int4(_) => PackedLinear::new_int4(&reader.int4(name)?, bias, activation)?,
        other => return Err(file::unsupported(reader, name, other)),
    })
}
