//! A linear layer with its weight packed for the CPU kernels.

use half::{bf16, f16};
use twofour::{
    Compressed, DataType, MatrixRef,
    file::{Reader, ValueFormat},
    kernel::{Activation, DenseWeight, Epilogue, KernelElement, SparseWeight},
    layer::PackedLinear,
};

use crate::{
    Error, Result,
    engine::Engine,
    linear,
    model::file::{self, unsupported},
};

/// A linear layer whose output features are those of its parts, one after the other: a file may hold queries, keys and values as three weights.
#[derive(Debug)]
pub(crate) struct Linear<T: KernelElement> {
    parts: Vec<LinearPart<T>>,
    outputs: usize,
}

/// Some of a linear layer's output features.
#[derive(Debug)]
pub(crate) struct LinearPart<T: KernelElement> {
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
    /// The layer of these parts.
    pub(crate) fn new(parts: Vec<LinearPart<T>>) -> Self {
        let outputs = parts.iter().map(|part| part.outputs).sum();
        Linear { parts, outputs }
    }

    /// A layer of a model in memory.
    pub(crate) fn of_model<E: Engine>(engine: &E, linear: &linear::Linear<E>) -> Result<Self> {
        let (outputs, inputs) = (linear.out_features(), linear.in_features());
        let bias = linear.bias().map(|bias| engine.read(bias.master())).transpose()?;
        let weight = match linear.sparse() {
            Some(_) => Weight::Sparse(SparseWeight::pack(file::compressed(engine, linear)?)?),
            None => Weight::dense(&narrowed(engine.read(linear.weight().master())?), (outputs, inputs))?,
        };
        Ok(Self::new(vec![LinearPart { weight, bias, outputs }]))
    }

    /// `activation(x · Wᵀ + bias)`, `[tokens, outputs]`, for `x: [tokens, inputs]`.
    pub(crate) fn forward(&self, x: &[T], tokens: usize, activation: Activation) -> Result<Vec<T>> {
        let mut y = vec![T::ZERO; tokens * self.outputs];
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
        self.parts.iter().map(LinearPart::bytes).sum()
    }

    /// The weight's values, where it is one dense weight.
    pub(crate) fn dense_values(&self) -> Option<&[T]> {
        match self.parts.as_slice() {
            [LinearPart { weight: Weight::Dense(weight), .. }] => Some(weight.values()),
            _ => None,
        }
    }
}

impl<T: KernelElement> LinearPart<T> {
    /// A weight `[outputs, inputs]` that a file holds dense, as `T`: packed as 2:4 where it is.
    pub(crate) fn dense(
        values: &[T],
        (outputs, inputs): (usize, usize),
        bias: Option<Vec<f32>>,
    ) -> Result<LinearPart<T>> {
        let compressed = |rows: usize, values: &[T]| -> Result<Option<Compressed<T>>> {
            Ok(Compressed::from_dense(MatrixRef::new(rows, inputs, values)?).ok())
        };
        // One row tells a dense weight from a 2:4 one in no time.
        let first = values.get(..inputs).map_or(Ok(None), |row| compressed(1, row))?;
        let sparse = if first.is_some() { compressed(outputs, values)? } else { None };
        let weight = match sparse {
            Some(sparse) => Weight::Sparse(SparseWeight::pack(sparse)?),
            None => Weight::dense(values, (outputs, inputs))?,
        };
        Ok(LinearPart { weight, bias, outputs })
    }

    /// A weight that stays dense whatever its values.
    pub(crate) fn always_dense(values: &[T], shape: (usize, usize), bias: Option<Vec<f32>>) -> Result<Self> {
        Ok(LinearPart { weight: Weight::dense(values, shape)?, bias, outputs: shape.0 })
    }

    /// A weight `[outputs, inputs]` that the file holds compressed, in the file's data type.
    pub(crate) fn compressed(
        reader: &Reader,
        name: &str,
        (outputs, inputs): (usize, usize),
        bias: Option<Vec<f32>>,
    ) -> Result<Self> {
        let format = file::compressed_format(reader, name, [outputs, inputs])?;
        let activation = Activation::Identity;
        let packed = match format {
            ValueFormat::Plain(DataType::F32) => PackedLinear::new(reader.compressed::<f32>(name)?, bias, activation)?,
            ValueFormat::Plain(DataType::BF16) => {
                PackedLinear::new(reader.compressed::<bf16>(name)?, bias, activation)?
            }
            ValueFormat::Plain(DataType::F16) => PackedLinear::new(reader.compressed::<f16>(name)?, bias, activation)?,
            ValueFormat::ScaledI8 | ValueFormat::GroupedI8(_) => {
                PackedLinear::new_int8(reader.int8(name)?, bias, activation)?
            }
            ValueFormat::Int4(_) => PackedLinear::new_int4(&reader.int4(name)?, bias, activation)?,
            other => return Err(unsupported(reader, name, other)),
        };
        Ok(LinearPart { weight: Weight::Packed(packed), bias: None, outputs })
    }

    fn forward(&self, x: &[T], tokens: usize, activation: Activation, y: &mut [T]) -> Result<(), Error> {
        let epilogue = Epilogue { bias: self.bias.as_deref(), activation };
        match &self.weight {
            Weight::Dense(weight) => weight.linear(x, tokens, epilogue, y)?,
            Weight::Sparse(weight) => weight.linear(x, tokens, epilogue, y)?,
            Weight::Packed(layer) => layer.forward_with(x, tokens, activation, y)?,
        }
        Ok(())
    }

    fn bytes(&self) -> usize {
        match &self.weight {
            Weight::Dense(weight) => weight.bytes(),
            Weight::Sparse(weight) => weight.bytes(),
            Weight::Packed(layer) => layer.bytes(),
        }
    }
}

impl<T: KernelElement> Weight<T> {
    fn dense(values: &[T], (outputs, inputs): (usize, usize)) -> Result<Self> {
        Ok(Weight::Dense(DenseWeight::pack(MatrixRef::new(outputs, inputs, values)?)?))
    }
}

/// The values rounded to `T`.
pub(crate) fn narrowed<T: KernelElement>(values: Vec<f32>) -> Vec<T> {
    values.into_iter().map(T::from_f32).collect()
}
