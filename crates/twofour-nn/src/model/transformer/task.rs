//! What a transformer reads, and what it is trained for.

use std::fmt::Debug;

use serde::{Serialize, de::DeserializeOwned};
use twofour::layer::Accumulate;

use super::Builder;
use crate::{
    Error, Result,
    block::{BatchShape, Workspace},
    engine::Engine,
    model::TransformerConfig,
    parameter::Parameter,
    parts::ModelParts,
};

/// Embeddings and head of a [`Transformer`](super::Transformer), and the batches that it learns from.
pub trait Task<E: Engine>: Debug + Send + Sized {
    /// The description of the model, which files and checkpoints hold.
    type Config: Debug + Clone + PartialEq + Send + Serialize + DeserializeOwned;

    /// A batch in the engine's memory.
    type Batch: Debug + Send;

    /// The parts of the embeddings.
    type Input: ModelParts<E>;

    /// The parts of the head.
    type Head: ModelParts<E>;

    /// What the backward pass of the embeddings reads beside the batch.
    type SavedInput: Saved<E>;

    /// What the backward pass of the head reads beside the batch and the hidden states.
    type SavedHead: Saved<E>;

    /// Whether a target is one of the classes that a sample as a whole is scored for, so that first choices are
    /// counted.
    const IS_CLASSIFIER: bool = false;

    /// The transformer of a model with this description, checked.
    ///
    /// # Errors
    /// A description of no such model, or of one that does not train.
    fn transformer(config: &Self::Config) -> Result<TransformerConfig>;

    /// The deviation of a parameter's initial values.
    fn deviation(config: &Self::Config, name: &str) -> f64;

    /// Embeddings and head.
    ///
    /// # Errors
    /// Those of the builder.
    fn build(builder: &Builder<'_, E>, config: &Self::Config) -> Result<Self>;

    /// The parts of the embeddings.
    fn input(&self) -> &Self::Input;

    /// The parts of the head.
    fn head(&self) -> &Self::Head;

    /// The parts of both for changing them.
    fn input_and_head_mut(&mut self) -> (&mut Self::Input, &mut Self::Head);

    /// The head's weight, where it is the embedding of tokens too.
    fn table(&self) -> Option<&Parameter<E>> {
        None
    }

    /// Inputs of a sample.
    fn positions(config: &Self::Config) -> usize;

    /// Notes in the description that feed-forward blocks have squared ReLU.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model that has no description of it.
    fn note_squared_relu(config: &mut Self::Config) -> Result<()>;

    /// Key and value of the description in the metadata of a model's file.
    ///
    /// # Errors
    /// A description that is no JSON.
    fn metadata(config: &Self::Config) -> serde_json::Result<(&'static str, String)>;

    /// Checks the shape of a batch.
    ///
    /// # Errors
    /// [`Error::Setting`] for a shape that the model has no positions for.
    fn expect_shape(&self, config: &Self::Config, shape: BatchShape) -> Result<()>;

    /// Checks inputs and targets of a batch.
    ///
    /// # Errors
    /// Inputs or targets that do not fit the shape or do not exist.
    fn expect_batch(&self, config: &Self::Config, batch: (&[u32], &[u32]), shape: BatchShape) -> Result<()>;

    /// Brings a batch to the engine's memory, in place of another of the same shape where there is one: inputs and
    /// targets of `shape.batch` samples.
    ///
    /// # Errors
    /// Inputs or targets that do not fit the shape, or another batch of another shape; not enough memory.
    fn upload(
        &self,
        engine: &E,
        config: &Self::Config,
        batch: (&[u32], &[u32]),
        shape: BatchShape,
        to: &mut Option<Self::Batch>,
    ) -> Result<()>;

    /// The targets of a batch, [`Kind::Index`](crate::engine::Kind::Index).
    fn targets(batch: &Self::Batch) -> &E::Buffer;

    /// What each target is one of.
    fn classes(&self, shape: BatchShape) -> usize;

    /// The hidden states before the first layer, and what was saved.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    fn embed(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        batch: (&Self::Config, &Self::Batch),
        shape: BatchShape,
    ) -> Result<(E::Buffer, Self::SavedInput)>;

    /// Writes or adds the gradients of the embeddings, from that of the hidden states.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    fn embed_gradient(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        saved: (Self::SavedInput, &Self::Batch),
        dx: E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<()>;

    /// Scores `[targets, classes]` of the hidden states behind the last layer, and what was saved.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    fn scores(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        hidden: (&E::Buffer, &Self::Batch),
        shape: BatchShape,
    ) -> Result<(E::Buffer, Self::SavedHead)>;

    /// Writes or adds the gradients of the head, from that of the scores; returns that of the hidden states.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    fn scores_gradient(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        saved: (E::Buffer, Self::SavedHead, &Self::Batch),
        d_scores: E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<E::Buffer>;
}

/// What a backward pass reads.
pub trait Saved<E: Engine> {
    /// The buffers, to give them back.
    fn into_buffers(self) -> Vec<E::Buffer>;
}

/// An error for the first number that is not below a bound.
pub(crate) fn expect_below(what: &'static str, ids: &[u32], bound: usize) -> Result<()> {
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= bound) {
        None => Ok(()),
        Some((position, &token)) => Err(Error::token(what, token, position, bound)),
    }
}
