//! The encoder that trains: BERT, with a head for masked tokens or for answers to questions.
//!
//! Sequences of a batch have one length: there is no padding, so nothing is masked in attention.

mod config;
mod head;
mod inputs;
mod task;
#[cfg(test)]
mod tests;

use twofour::layer::Accumulate;

pub use self::{
    config::{BertConfig, EncoderTask},
    inputs::{BertBatch, BertSamples},
    task::EncoderTasks,
};
use super::{
    Objective, Transformer,
    transformer::{INITIAL_DEVIATION, normal},
};
use crate::{Result, block::BatchShape, engine::Engine};

/// A BERT (Devlin et al., 2019) without dropout: embeddings of tokens, positions and token types, layers of full
/// attention and feed-forward blocks with a norm behind each, and the head of its [`EncoderTask`].
pub type Bert<E> = Transformer<E, EncoderTasks<E>>;

/// The random value of a parameter of an encoder.
pub(super) fn initial(seed: u64, name: &str, shape: &[usize]) -> Vec<f32> {
    normal(seed, name, shape, INITIAL_DEVIATION)
}

impl<E: Engine> Bert<E> {
    /// The last hidden states of sequences of tokens and their types, `[batch, positions, width]`.
    ///
    /// # Errors
    /// Tokens or types that do not fit the shape or do not exist; sequences longer than the context.
    pub fn hidden(&mut self, engine: &E, tokens: &[u32], types: &[u32], shape: BatchShape) -> Result<Vec<f32>> {
        let batch = BertBatch::of_sequences(engine, self.config(), (tokens, types), shape)?;
        self.hidden_of(engine, &batch, shape)
    }

    /// Adds the sum of the cross-entropies, in nats, of the samples' targets to `loss`.
    ///
    /// # Errors
    /// Samples that do not fit the shape, the task or the vocabulary.
    pub fn loss(&mut self, engine: &E, samples: BertSamples<'_>, loss: &mut E::Buffer) -> Result<()> {
        let batch = BertBatch::new(engine, self.config(), samples)?;
        self.loss_of(engine, (&batch, samples.targets), samples.shape(), loss).map(|_| ())
    }

    /// A forward and a backward pass: adds to `loss` as [`Bert::loss`] does, and writes or adds the gradients, times
    /// `scale`, of all parameters.
    ///
    /// # Errors
    /// Those of [`Bert::loss`]; a model without [`Transformer::begin_training`].
    pub fn gradients(
        &mut self,
        engine: &E,
        samples: BertSamples<'_>,
        (scale, accumulate): (f32, Accumulate),
        loss: &mut E::Buffer,
    ) -> Result<()> {
        let batch = BertBatch::new(engine, self.config(), samples)?;
        let batch = (&batch, Objective::Targets);
        self.gradients_of(engine, batch, samples.shape(), (scale, accumulate), loss, &mut |_| Ok(()))
    }
}
