//! What a trainer takes its batches from.

use std::fmt::Debug;

use crate::{Result, block::BatchShape, engine::Engine, model::TrainedModel};

/// Samples that a model is trained on, in a training part and a validation part: texts ([`Corpus`](super::Corpus)),
/// images ([`ImageSet`](super::ImageSet)), or texts and questions of an encoder ([`EncoderData`](super::EncoderData)).
pub trait TrainingData: Debug + Send + Sync {
    /// The model that learns from them.
    type Model<E: Engine>: TrainedModel<E>;

    /// Makes a model ready for batches of these samples: checks that they fit it, and brings to the engine's memory
    /// what their inputs stand for.
    ///
    /// # Errors
    /// Samples that do not fit the model; not enough memory.
    fn prepare<E: Engine>(&self, engine: &E, model: &mut Self::Model<E>) -> Result<()>;

    /// The batch of a step: `shape.batch` samples of the training part with `shape.positions` inputs each, the same for
    /// the same seed and step.
    fn batch(&self, shape: BatchShape, seed: u64, step: u64) -> Batch;

    /// Batches of at most `shape.batch` samples that cover the validation part evenly, with at most `limit` samples
    /// together; the same at every call.
    fn validation_batches(&self, shape: BatchShape, limit: usize) -> impl Iterator<Item = Batch>;

    /// A number that tells these samples from others.
    fn fingerprint(&self) -> u64;
}

/// The description of the model that learns from samples `D` on an engine `E`.
pub type ConfigOf<D, E> = <<D as TrainingData>::Model<E> as TrainedModel<E>>::Config;

/// Inputs and targets of samples, one sample after the other, each with as many.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Number of samples.
    pub samples: usize,
    /// The inputs: tokens, the numbers of patches, or what [`EncoderData`](super::EncoderData) says.
    pub inputs: Vec<u32>,
    /// The targets: the tokens that come next, classes, masked tokens, or the ends of answers.
    pub targets: Vec<u32>,
}
