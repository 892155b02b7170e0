//! Image encoders with random weights, for measurements: a model's speed depends on its shape and types, not on what it
//! learned.

use twofour::{
    Arithmetic, Axis, Compressed, MatrixRef, Pattern,
    int4::Granularity,
    int8::Int8,
    kernel::{KernelElement, quantize},
    select,
};

use super::{ImageEncoder, TransformerConfig};
use crate::{
    Result,
    model::inference::{linear::LinearPart, parts::Parts, weight::Weight},
    random::Stream,
};

/// The form of a linear layer's weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightForm {
    /// Dense, of the floats that the model computes in.
    Dense,
    /// The two largest of every four, of the floats that the model computes in.
    TwoFour,
    /// Dense 8-bit integers with a scale for each row.
    DenseInt8,
    /// The two largest of every four, as 8-bit integers with a scale for each row.
    TwoFourInt8,
}

/// The forms of the weights of every block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ImageWeights {
    /// Form of queries, keys and values, and of the output projection.
    pub attention: WeightForm,
    /// Form of the first layer of the feed-forward block (SAM's `lin1`).
    pub up: WeightForm,
    /// Form of the second layer of the feed-forward block (SAM's `lin2`).
    pub down: WeightForm,
}

impl ImageWeights {
    /// All of one form.
    #[must_use]
    pub fn all(form: WeightForm) -> Self {
        ImageWeights { attention: form, up: form, down: form }
    }
}

impl<T: KernelElement> ImageEncoder<T> {
    /// An encoder of that description whose weights are random, those of the blocks' linear layers in these forms. The
    /// values depend on the seed, and all forms are made of the same ones.
    ///
    /// # Errors
    /// Those of [`TransformerConfig::validate`], and of packing.
    pub fn random(config: TransformerConfig, weights: ImageWeights, seed: u64) -> Result<Self> {
        Self::build(config.clone(), &RandomParts { config: &config, weights, seed })
    }
}

/// The parts of a random encoder.
pub(in crate::model) struct RandomParts<'a> {
    pub(in crate::model) config: &'a TransformerConfig,
    pub(in crate::model) weights: ImageWeights,
    pub(in crate::model) seed: u64,
}

/// The deviation of weights, about that of trained ones.
const DEVIATION: f32 = 0.02;

impl RandomParts<'_> {
    /// Uniform numbers of the deviation.
    fn values<T: Arithmetic>(&self, name: &str, len: usize) -> Vec<T> {
        let stream = Stream::new(self.seed, name);
        let uniform = |bits: u64| ((bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 1.732 * DEVIATION;
        (0..len).map(|i| T::from_f32(uniform(stream.bits(i as u64)))).collect()
    }

    /// The weight of a linear layer, `[outputs, inputs]`, and its bias.
    pub(in crate::model) fn weight<T: KernelElement>(
        &self,
        name: &str,
        (outputs, inputs): (usize, usize),
    ) -> Result<(Weight<T>, Option<Vec<f32>>)> {
        let part = name.rsplit_once("mlp.").map(|(_, part)| part);
        let form = match part {
            Some("up") => self.weights.up,
            Some(_) => self.weights.down,
            None if name.starts_with("blocks.") => self.weights.attention,
            None => WeightForm::Dense,
        };
        let has_bias = self.config.attention.qkv_bias || !name.ends_with("attn.qkv");
        let bias = has_bias.then(|| self.values(&format!("{name}.bias"), outputs));
        Ok((formed(form, self.values(name, outputs * inputs), (outputs, inputs))?, bias))
    }
}

/// A dense weight `[outputs, inputs]` in that form.
fn formed<T: KernelElement>(form: WeightForm, values: Vec<T>, (outputs, inputs): (usize, usize)) -> Result<Weight<T>> {
    let integers = || -> Result<_> {
        let floats: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
        Ok(quantize(MatrixRef::new(outputs, inputs, &floats)?)?)
    };
    Ok(match form {
        WeightForm::Dense => Weight::Dense(values),
        WeightForm::TwoFour => Weight::Sparse(Compressed::from_pruned(MatrixRef::new(outputs, inputs, &values)?)?),
        WeightForm::DenseInt8 => {
            let (values, scales) = integers()?;
            Weight::DenseInt8 { values, scales }
        }
        WeightForm::TwoFourInt8 => {
            let mask = select::magnitude(MatrixRef::new(outputs, inputs, &values)?, Pattern::TWO_FOUR, Axis::Row)?;
            let (integers, scales) = integers()?;
            let weight = Compressed::from_masked(MatrixRef::new(outputs, inputs, &integers)?, &mask)?;
            Weight::Int8(Int8::from_parts(weight, scales, Granularity::Row)?)
        }
    })
}

impl<T: KernelElement> Parts<T> for RandomParts<'_> {
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let mut values: Vec<f32> = self.values(name, len);
        if name.ends_with("norm.weight") || name.ends_with(".scale") {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(values)
    }

    fn table(&self, name: &str, [rows, width]: [usize; 2]) -> Result<Vec<T>> {
        Ok(self.values(name, rows * width))
    }

    fn linear_parts(&self, name: &str, shape: (usize, usize)) -> Result<Vec<LinearPart<T>>> {
        let (weight, bias) = self.weight(name, shape)?;
        Ok(vec![LinearPart::of(weight, shape, bias)])
    }
}
