//! Inference with byte-level GPTs, from memory and from their own files.

use std::{collections::HashMap, path::Path};

use twofour::{file::Reader, kernel::KernelElement};

use super::{Inference, linear::LinearPart, parts::Parts, passes::narrowed, weight::Weight};
use crate::{
    Error, Result,
    engine::Engine,
    linear,
    model::{Gpt, config::TransformerConfig, file},
    parameter::Parameter,
};

impl<T: KernelElement> Inference<T> {
    /// Packs the present weights of a model, which may be on any engine.
    ///
    /// # Errors
    /// Those of reading and packing the weights.
    pub fn new<E: Engine>(engine: &E, model: &Gpt<E>) -> Result<Self> {
        let parameters = model.parameters().into_iter().map(|parameter| (parameter.name(), parameter)).collect();
        let linears = model.linears().map(|linear| (linear.name(), linear)).collect();
        Self::build(model.config().clone(), &InMemory { engine, parameters, linears })
    }

    /// Reads a model that [`Gpt::save`] wrote, or that `twofour compress` made of one. Compressed weights stay
    /// compressed, in the data type of the file: f32, f16, bf16, int8 with a scale for each row, or int4; int8 with
    /// scales for groups is dequantized to bf16.
    ///
    /// # Errors
    /// A file that is not a model's, lacks a tensor or holds one of another shape; those of reading.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_reader(&Reader::open(path)?)
    }

    /// [`Inference::load`], from a file that is open already.
    ///
    /// # Errors
    /// As for [`Inference::load`].
    pub fn from_reader(reader: &Reader) -> Result<Self> {
        let config = file::config_of(reader)?;
        Self::build(config.clone(), &OfFile { reader, config: &config })
    }
}

/// A model in an engine's memory.
struct InMemory<'a, E: Engine> {
    engine: &'a E,
    parameters: HashMap<&'a str, &'a Parameter<E>>,
    linears: HashMap<&'a str, &'a linear::Linear<E>>,
}

impl<E: Engine, T: KernelElement> Parts<T> for InMemory<'_, E> {
    fn vector(&self, name: &str, _: usize) -> Result<Vec<f32>> {
        Ok(self.engine.read(self.parameters.get(name).ok_or_else(|| absent(name))?.master())?)
    }

    fn table(&self, name: &str, [rows, width]: [usize; 2]) -> Result<Vec<T>> {
        Parts::<T>::vector(self, name, rows * width).map(|values| narrowed(&values))
    }

    fn linear_parts(&self, name: &str, _: (usize, usize)) -> Result<Vec<LinearPart<T>>> {
        Ok(vec![LinearPart::of_model(self.engine, self.linears.get(name).ok_or_else(|| absent(name))?)?])
    }
}

fn absent(name: &str) -> Error {
    Error::Setting {
        what: "a part of the model",
        found: format!("no `{name}`"),
        expected: "a model with all its parts",
    }
}

/// A file that [`Gpt::save`] wrote.
pub(super) struct OfFile<'a> {
    pub(super) reader: &'a Reader,
    pub(super) config: &'a TransformerConfig,
}

impl<T: KernelElement> Parts<T> for OfFile<'_> {
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        file::values(self.reader, name, &[len])
    }

    fn table(&self, name: &str, shape: [usize; 2]) -> Result<Vec<T>> {
        file::values(self.reader, name, &shape).map(|values| narrowed(&values))
    }

    fn embedding(&self, shape: [usize; 2]) -> Result<Weight<T>> {
        let name = "embedding.weight";
        match file::dense_int8(self.reader, name)? {
            Some((values, scales)) => {
                file::expect_shape(self.reader, name, &shape, &self.reader.tensor(name)?.info.shape)?;
                Ok(Weight::DenseInt8 { values, scales })
            }
            None => self.table(name, shape).map(Weight::Dense),
        }
    }

    fn linear_parts(&self, name: &str, (outputs, inputs): (usize, usize)) -> Result<Vec<LinearPart<T>>> {
        let (reader, weight) = (self.reader, format!("{name}.weight"));
        let bias = match self.config.has_bias(name) {
            false => None,
            true => Some(file::plain(reader, &format!("{name}.bias"), &[outputs])?),
        };
        let part = if file::is_compressed(reader, &weight) {
            LinearPart::compressed(reader, &weight, (outputs, inputs), bias)?
        } else if let Some((values, scales)) = file::dense_int8(reader, &weight)? {
            file::expect_shape(reader, &weight, &[outputs, inputs], &reader.tensor(&weight)?.info.shape)?;
            LinearPart::of(Weight::DenseInt8 { values, scales }, (outputs, inputs), bias)
        } else {
            let values = narrowed(&file::plain(reader, &weight, &[outputs, inputs])?);
            match self.config.is_tied() && name == "head" {
                true => LinearPart::of(Weight::Dense(values), (outputs, inputs), bias),
                false => LinearPart::dense(values, (outputs, inputs), bias)?,
            }
        };
        Ok(vec![part])
    }
}
