//! Models with random weights, for measurements: a model's speed depends on its shape and types, not on what it
//! learned.

use std::ops::Range;

use twofour::{
    Compressed,
    compressed::{self, code},
    int4::{Granularity, Int4},
    int8::Int8,
    kernel::KernelElement,
};

use super::{Inference, linear::LinearPart, parts::Parts, weight::Weight};
use crate::{Result, model::config::TransformerConfig, random::Stream};

/// The type of weights that [`Inference::random`] makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RandomWeights {
    /// Dense, of the floats that the model computes in.
    Dense,
    /// 2:4, of the floats that the model computes in.
    Sparse,
    /// Dense 8-bit integers with a scale for each row.
    DenseInt8,
    /// 2:4, 8-bit integers with a scale for each row.
    Int8,
    /// 2:4, 4-bit integers.
    Int4(Granularity),
}

impl<T: KernelElement> Inference<T> {
    /// A model of that description whose matrices are random: those of the layers as `layers` says, embedding and head
    /// as `head` says. Of 2:4 weights the two kept elements of each group are random. Gains of norms are 1 and biases
    /// 0.
    ///
    /// ```
    /// use twofour_nn::model::{TransformerConfig, GptConfig, Inference, RandomWeights};
    /// let sizes = GptConfig { layers: 1, width: 32, heads: 2, context: 8, feed_forward: 64 };
    /// let config = TransformerConfig::from(&sizes);
    /// let model = Inference::<f32>::random(config, RandomWeights::Int8, RandomWeights::DenseInt8, 0)?;
    /// assert_eq!(model.session().feed(&[1, 2])?.len(), 256);
    /// # Ok::<(), twofour_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`TransformerConfig::validate`], and of packing.
    pub fn random(config: TransformerConfig, layers: RandomWeights, head: RandomWeights, seed: u64) -> Result<Self> {
        Self::build(config.clone(), &Random { config: &config, layers, head, seed })
    }
}

/// The parts of a random model.
struct Random<'a> {
    config: &'a TransformerConfig,
    layers: RandomWeights,
    head: RandomWeights,
    seed: u64,
}

/// The deviation of weights, about that of trained ones.
const DEVIATION: f32 = 0.02;

impl Random<'_> {
    fn weight<T: KernelElement>(&self, kind: RandomWeights, name: &str, [rows, cols]: [usize; 2]) -> Result<Weight<T>> {
        let stream = Stream::new(self.seed, name);
        let groups = compressed::groups_per_row(cols);
        Ok(match kind {
            RandomWeights::Dense => Weight::Dense(floats(stream, 0..rows * cols)),
            RandomWeights::Sparse => {
                Weight::Sparse(sparse([rows, cols], stream, floats(stream, 0..2 * rows * groups))?)
            }
            RandomWeights::DenseInt8 => {
                let values = integers(stream, rows * cols, 8);
                Weight::DenseInt8 { values, scales: vec![DEVIATION / 64.0; rows] }
            }
            RandomWeights::Int8 => {
                let weight = sparse([rows, cols], stream, integers(stream, 2 * rows * groups, 8))?;
                Weight::Int8(Int8::from_parts(weight, vec![DEVIATION / 64.0; rows], Granularity::Row)?)
            }
            RandomWeights::Int4(granularity) => {
                let weight = sparse([rows, cols], stream, integers(stream, 2 * rows * groups, 4))?;
                let scale = half::f16::from_f32(DEVIATION / 4.0);
                let scales = vec![scale; rows * granularity.scales_per_row(cols)];
                Weight::Int4(Int4::from_parts(weight, scales, granularity)?)
            }
        })
    }
}

/// Uniform numbers of that deviation.
fn floats<T: KernelElement>(stream: Stream, range: Range<usize>) -> Vec<T> {
    let uniform = |bits: u64| ((bits >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * 1.732 * DEVIATION;
    range.map(|i| T::from_f32(uniform(stream.bits(i as u64)))).collect()
}

/// Integers of so many bits.
fn integers(stream: Stream, count: usize, bits: u32) -> Vec<i8> {
    let of_word = |word: u64| stream.bits(word).to_le_bytes();
    let all = (0..count.div_ceil(8)).flat_map(|word| of_word(word as u64));
    // -128 is no value of symmetric quantization.
    all.take(count).map(|byte| (byte as i8).max(-127) >> (8 - bits)).collect()
}

/// A 2:4 weight of given values at random positions.
fn sparse<V: twofour::Element>([rows, cols]: [usize; 2], stream: Stream, values: Vec<V>) -> Result<Compressed<V>> {
    let (groups, words) = (compressed::groups_per_row(cols), compressed::meta_words_per_row(cols));
    // A stream of its own: that of the values is used up from its beginning.
    let word = |index: usize| {
        let bits = stream.bits(index as u64 | 1 << 48);
        let group = |i: usize| u32::from(code::LEGAL[(bits >> (8 * i) & 0xFF) as usize % code::LEGAL.len()]) << (4 * i);
        let present = (groups - index % words * 8).min(8);
        (0..present).fold(0, |word, i| word | group(i))
    };
    Ok(Compressed::from_parts(rows, cols, values, (0..rows * words).map(word).collect())?)
}

impl<T: KernelElement> Parts<T> for Random<'_> {
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        Ok(vec![if name.ends_with("bias") { 0.0 } else { 1.0 }; len])
    }

    fn table(&self, name: &str, [rows, width]: [usize; 2]) -> Result<Vec<T>> {
        Ok(floats(Stream::new(self.seed, name), 0..rows * width))
    }

    fn embedding(&self, shape: [usize; 2]) -> Result<Weight<T>> {
        self.weight(self.head, "embedding.weight", shape)
    }

    fn linear_parts(&self, name: &str, (outputs, inputs): (usize, usize)) -> Result<Vec<LinearPart<T>>> {
        let kind = if name == "head" { self.head } else { self.layers };
        let bias = self.config.has_bias(name).then(|| vec![0.0; outputs]);
        Ok(vec![LinearPart::of(self.weight(kind, name, [outputs, inputs])?, (outputs, inputs), bias)])
    }
}
