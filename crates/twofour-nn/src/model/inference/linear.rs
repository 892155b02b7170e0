//! A linear layer with its weight packed for the CPU kernels.

use half::{bf16, f16};
use twofour::{
    Compressed, DataType, MatrixRef,
    file::{Reader, ValueFormat},
    kernel::{Activation, DenseWeight, DenseWeightI8, Epilogue, KernelElement, SparseWeight},
    layer::PackedLinear,
};

use super::{
    passes::{narrowed, widened},
    weight::Weight,
};
use crate::{
    Result,
    engine::Engine,
    linear,
    model::file::{self, unsupported},
};

/// A linear layer whose output features are those of its parts, one after the other: a file may hold queries, keys and
/// values as three weights. Neighbouring parts of one kind are packed as one weight.
#[derive(Debug)]
pub(crate) struct Linear<T: KernelElement> {
    parts: Vec<Part<T>>,
    outputs: usize,
}

/// Some of a linear layer's output features, before they are packed.
#[derive(Debug)]
pub(crate) struct LinearPart<T: KernelElement> {
    pub(super) weight: Weight<T>,
    pub(super) bias: Option<Vec<f32>>,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
}

/// Some of a linear layer's output features.
#[derive(Debug)]
struct Part<T: KernelElement> {
    weight: PackedWeight<T>,
    bias: Option<Vec<f32>>,
    outputs: usize,
}

#[derive(Debug)]
enum PackedWeight<T: KernelElement> {
    Dense(DenseWeight<T>),
    Sparse(SparseWeight<T>),
    DenseInt8(DenseWeightI8),
    /// A weight that was compressed in its file, in whatever data type; it brings its bias with it.
    Compressed(PackedLinear),
}

impl<T: KernelElement> Linear<T> {
    /// Packs the layer of these parts.
    pub(crate) fn new(parts: Vec<LinearPart<T>>) -> Result<Self> {
        let outputs = parts.iter().map(|part| part.outputs).sum();
        let mut joined: Vec<LinearPart<T>> = Vec::with_capacity(parts.len());
        for part in parts {
            match joined.last_mut() {
                Some(last) if last.is_like(&part) => last.append(part)?,
                _ => joined.push(part),
            }
        }
        Ok(Linear { parts: joined.into_iter().map(LinearPart::pack).collect::<Result<_>>()?, outputs })
    }

    /// `activation(x · Wᵀ + bias)`, `[tokens, outputs]`, for `x: [tokens, inputs]`.
    pub(crate) fn forward(&self, x: &[T], tokens: usize, activation: Activation) -> Result<Vec<T>> {
        let mut y: Vec<T> = bytemuck::allocation::zeroed_vec(tokens * self.outputs);
        let mut first = 0;
        for part in &self.parts {
            if tokens == 1 || self.parts.len() == 1 {
                part.forward(x, tokens, activation, &mut y[first * tokens..][..part.outputs * tokens])?;
            } else {
                let mut own = vec![T::ZERO; tokens * part.outputs];
                part.forward(x, tokens, activation, &mut own)?;
                let rows = y.chunks_exact_mut(self.outputs).zip(own.chunks_exact(part.outputs));
                rows.for_each(|(y, own)| y[first..][..part.outputs].copy_from_slice(own));
            }
            first += part.outputs;
        }
        Ok(y)
    }

    /// Bytes of the weights.
    pub(crate) fn bytes(&self) -> usize {
        self.parts.iter().map(Part::bytes).sum()
    }

    /// A row of the weight, where it is one dense weight.
    pub(crate) fn dense_row(&self, row: usize) -> Option<Vec<f32>> {
        match self.parts.as_slice() {
            [Part { weight: PackedWeight::Dense(weight), .. }] => {
                let inputs = weight.in_features();
                weight.values().get(row * inputs..(row + 1) * inputs).map(widened)
            }
            [Part { weight: PackedWeight::DenseInt8(weight), .. }] if row < weight.out_features() => {
                let (values, scale) = weight.row(row);
                Some(values.iter().map(|q| f32::from(*q) * scale).collect())
            }
            _ => None,
        }
    }
}

impl<T: KernelElement> LinearPart<T> {
    /// The layer of a model in memory.
    pub(crate) fn of_model<E: Engine>(engine: &E, linear: &linear::Linear<E>) -> Result<Self> {
        let (outputs, inputs) = (linear.out_features(), linear.in_features());
        let bias = linear.bias().map(|bias| engine.read(bias.master())).transpose()?;
        let weight = if linear.is_two_of_four() {
            Weight::Sparse(file::compressed(engine, linear)?)
        } else {
            Weight::Dense(narrowed(&linear.squashed(engine)?))
        };
        Ok(LinearPart { weight, bias, outputs, inputs })
    }

    /// A part `[outputs, inputs]` of that weight.
    pub(crate) fn of(weight: Weight<T>, (outputs, inputs): (usize, usize), bias: Option<Vec<f32>>) -> Self {
        LinearPart { weight, bias, outputs, inputs }
    }

    /// A weight `[outputs, inputs]` that a file holds dense, as `T`: packed as 2:4 where it is.
    pub(crate) fn dense(
        values: Vec<T>,
        (outputs, inputs): (usize, usize),
        bias: Option<Vec<f32>>,
    ) -> Result<LinearPart<T>> {
        let compressed = |rows: usize, values: &[T]| -> Result<Option<Compressed<T>>> {
            Ok(Compressed::from_dense(MatrixRef::new(rows, inputs, values)?).ok())
        };
        // One row tells a dense weight from a 2:4 one in no time.
        let first = values.get(..inputs).map_or(Ok(None), |row| compressed(1, row))?;
        let sparse = if first.is_some() { compressed(outputs, &values)? } else { None };
        let weight = sparse.map_or(Weight::Dense(values), Weight::Sparse);
        Ok(LinearPart { weight, bias, outputs, inputs })
    }

    /// A weight `[outputs, inputs]` that the file holds compressed, in the file's data type.
    pub(crate) fn compressed(
        reader: &Reader,
        name: &str,
        (outputs, inputs): (usize, usize),
        bias: Option<Vec<f32>>,
    ) -> Result<Self> {
        let weight = match file::compressed_format(reader, name, [outputs, inputs])? {
            ValueFormat::Plain(DataType::F32) => Weight::F32(reader.compressed::<f32>(name)?),
            ValueFormat::Plain(DataType::BF16) => Weight::Bf16(reader.compressed::<bf16>(name)?),
            ValueFormat::Plain(DataType::F16) => Weight::F16(reader.compressed::<f16>(name)?),
            ValueFormat::ScaledI8 | ValueFormat::GroupedI8(_) => Weight::Int8(reader.int8(name)?),
            ValueFormat::Int4(_) => Weight::Int4(reader.int4(name)?),
            other => return Err(unsupported(reader, name, other)),
        };
        Ok(LinearPart { weight, bias, outputs, inputs })
    }

    /// Whether the part below can be packed together with this one.
    pub(super) fn is_like(&self, below: &Self) -> bool {
        self.inputs == below.inputs && self.bias.is_some() == below.bias.is_some() && self.weight.is_like(&below.weight)
    }

    /// Adds the output features of a part that [`LinearPart::is_like`] this one.
    pub(super) fn append(&mut self, below: Self) -> Result<()> {
        self.weight.append(below.weight)?;
        if let (Some(bias), Some(mut below)) = (&mut self.bias, below.bias) {
            bias.append(&mut below);
        }
        self.outputs += below.outputs;
        Ok(())
    }

    fn pack(self) -> Result<Part<T>> {
        let LinearPart { weight, mut bias, outputs, inputs } = self;
        let plain = Activation::Identity;
        let weight = match weight {
            Weight::Dense(values) => PackedWeight::Dense(DenseWeight::pack(MatrixRef::new(outputs, inputs, &values)?)?),
            Weight::Sparse(weight) => PackedWeight::Sparse(SparseWeight::pack(weight)?),
            Weight::DenseInt8 { values, scales } => {
                PackedWeight::DenseInt8(DenseWeightI8::with_scales(MatrixRef::new(outputs, inputs, &values)?, scales)?)
            }
            Weight::F32(weight) => PackedWeight::Compressed(PackedLinear::new(weight, bias.take(), plain)?),
            Weight::Bf16(weight) => PackedWeight::Compressed(PackedLinear::new(weight, bias.take(), plain)?),
            Weight::F16(weight) => PackedWeight::Compressed(PackedLinear::new(weight, bias.take(), plain)?),
            Weight::Int8(weight) => PackedWeight::Compressed(PackedLinear::new_int8(weight, bias.take(), plain)?),
            Weight::Int4(weight) => PackedWeight::Compressed(PackedLinear::new_int4(&weight, bias.take(), plain)?),
        };
        Ok(Part { weight, bias, outputs })
    }
}

impl<T: KernelElement> Part<T> {
    fn forward(&self, x: &[T], tokens: usize, activation: Activation, y: &mut [T]) -> Result<()> {
        let epilogue = Epilogue { bias: self.bias.as_deref(), activation };
        match &self.weight {
            PackedWeight::Dense(weight) => weight.linear(x, tokens, epilogue, y)?,
            PackedWeight::Sparse(weight) => weight.linear(x, tokens, epilogue, y)?,
            PackedWeight::DenseInt8(weight) => {
                let mut sums = vec![0f32; y.len()];
                weight.linear(&widened(x), tokens, epilogue, &mut sums)?;
                y.copy_from_slice(&narrowed::<T>(&sums));
            }
            PackedWeight::Compressed(layer) => layer.forward_with(x, tokens, activation, y)?,
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        match &self.weight {
            PackedWeight::Dense(weight) => weight.bytes(),
            PackedWeight::Sparse(weight) => weight.bytes(),
            PackedWeight::DenseInt8(weight) => weight.bytes(),
            PackedWeight::Compressed(layer) => layer.bytes(),
        }
    }
}
