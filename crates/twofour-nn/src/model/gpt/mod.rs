//! The decoder that trains.

mod file;
mod perplexity;
mod task;

pub use task::NextToken;
pub(super) use task::expect_sequences;
pub(crate) use task::expect_trainable;

use twofour::layer::Accumulate;

use super::{Objective, Transformer};
use crate::{Result, block::BatchShape, engine::Engine};

/// A decoder, such as a byte-level GPT or a LLaMA.
///
/// ```
/// use twofour_nn::{block::BatchShape, model::{Gpt, GptConfig}};
/// use twofour_transformer::engine::cpu::CpuEngine;
/// let config = GptConfig { layers: 2, width: 32, heads: 2, context: 16, feed_forward: 64 };
/// let mut model = Gpt::new(&CpuEngine, &config, 0)?;
/// let bytes: Vec<u32> = b"two of four".iter().map(|&byte| byte.into()).collect();
/// let logits = model.logits(&CpuEngine, &bytes, BatchShape { batch: 1, positions: 11 })?;
/// assert_eq!(logits.len(), 11 * 256);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
pub type Gpt<E> = Transformer<E, NextToken<E>>;

impl<E: Engine> Gpt<E> {
    /// Scores of the next token after each of `tokens` `[batch, positions]`: `[batch, positions, vocabulary]`.
    ///
    /// # Errors
    /// Sequences longer than the context, tokens outside the vocabulary.
    pub fn logits(&mut self, engine: &E, tokens: &[u32], shape: BatchShape) -> Result<Vec<f32>> {
        match self.uploaded(engine, (tokens, tokens), shape)? {
            Some(batch) => self.with_scores(engine, &batch, shape, |_, scores| Ok(engine.read(scores)?)),
            None => Ok(vec![]),
        }
    }

    /// Adds the sum of the cross-entropies, in nats, of predicting `targets` from `tokens`, both `[batch, positions]`,
    /// to `loss`.
    ///
    /// # Errors
    /// Those of [`Gpt::logits`].
    pub fn loss(
        &mut self,
        engine: &E,
        (tokens, targets): (&[u32], &[u32]),
        shape: BatchShape,
        loss: &mut E::Buffer,
    ) -> Result<()> {
        self.evaluate(engine, (tokens, targets), shape, loss).map(|_| ())
    }

    /// A forward and a backward pass: adds to `loss` as [`Gpt::loss`] does, and writes or adds the gradients, times
    /// `scale`, of all parameters.
    ///
    /// # Errors
    /// Those of [`Gpt::loss`]; a model without [`Transformer::begin_training`].
    pub fn gradients(
        &mut self,
        engine: &E,
        batch: (&[u32], &[u32]),
        shape: BatchShape,
        scaling: (f32, Accumulate),
        loss: &mut E::Buffer,
    ) -> Result<()> {
        let batch = self.uploaded(engine, batch, shape)?;
        batch.map_or(Ok(()), |batch| {
            self.gradients_of(engine, (&batch, Objective::Targets), shape, scaling, loss, &mut |_| Ok(()))
        })
    }
}
