//! The encoder that trains: BERT, with a head for masked tokens or for answers to questions.
//!
//! Sequences of a batch have one length: there is no padding, so nothing is masked in attention.

mod build;
mod config;
mod embeddings;
mod encode;
mod head;
mod inputs;
#[cfg(test)]
mod tests;
mod trained;

use twofour::layer::Accumulate;

pub(super) use self::build::initial;
pub(crate) use self::inputs::expect_below;
pub use self::{
    config::{BertConfig, EncoderTask},
    inputs::{BertBatch, BertSamples},
};
use self::{
    embeddings::{BertEmbeddings, SavedEmbeddings},
    head::BertHead,
};
use crate::{
    Error, Result,
    block::{
        BatchShape, PostNormAttention, PostNormFeedForward, SavedPostNormAttention, SavedPostNormFeedForward, Workspace,
    },
    engine::{Engine, StepPhase},
    linear::Linear,
    parameter::Parameter,
};

/// A BERT (Devlin et al., 2019) without dropout: embeddings of tokens, positions and token types, layers of full attention and feed-forward blocks with a norm behind
/// each, and the head of its [`EncoderTask`]. Linear layers are dense or 2:4, each for itself.
#[derive(Debug)]
pub struct Bert<E: Engine> {
    config: BertConfig,
    embeddings: BertEmbeddings<E>,
    layers: Vec<BertLayer<E>>,
    head: BertHead<E>,
    workspace: Workspace<E>,
}

/// One layer of a [`Bert`].
#[derive(Debug)]
pub struct BertLayer<E: Engine> {
    /// Attention.
    pub attention: PostNormAttention<E>,
    /// Feed-forward.
    pub feed_forward: PostNormFeedForward<E>,
}

/// What the backward pass reads.
struct Saved<E: Engine> {
    embeddings: SavedEmbeddings<E>,
    layers: Vec<(SavedPostNormAttention<E>, SavedPostNormFeedForward<E>)>,
}

impl<E: Engine> Bert<E> {
    /// The description.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// The layers, first to last.
    pub fn layers(&self) -> &[BertLayer<E>] {
        &self.layers
    }

    /// The linear layers, in the order of computation.
    pub fn linears(&self) -> impl Iterator<Item = &Linear<E>> {
        let layers = self.layers.iter().flat_map(|BertLayer { attention, feed_forward }| {
            [&attention.qkv, &attention.out, &feed_forward.up, &feed_forward.down]
        });
        layers.chain(self.head.linears())
    }

    /// The linear layers for changing them.
    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear<E>> {
        let layers = self.layers.iter_mut().flat_map(|BertLayer { attention, feed_forward }| {
            [&mut attention.qkv, &mut attention.out, &mut feed_forward.up, &mut feed_forward.down]
        });
        layers.chain(self.head.linears_mut())
    }

    /// All parameters in a fixed order: embeddings, norms, linear layers.
    pub fn parameters(&self) -> Vec<&Parameter<E>> {
        let mut all: Vec<_> = self.embeddings.parameters().collect();
        for BertLayer { attention, feed_forward } in &self.layers {
            all.extend(attention.norm.parameters().chain(feed_forward.norm.parameters()));
        }
        all.extend(self.head.norm().into_iter().flat_map(|norm| norm.parameters()));
        all.extend(self.linears().flat_map(|linear| [Some(linear.weight()), linear.bias()]).flatten());
        all
    }

    /// All parameters for changing them, in the order of [`Bert::parameters`]. After a change of a 2:4 layer's weight, call [`Linear::refresh`].
    pub fn parameters_mut(&mut self) -> Vec<&mut Parameter<E>> {
        let Bert { embeddings, layers, head, .. } = self;
        let mut all: Vec<_> = embeddings.parameters_mut().collect();
        let mut linears = vec![];
        for BertLayer { attention, feed_forward } in layers {
            all.extend(attention.norm.parameters_mut().chain(feed_forward.norm.parameters_mut()));
            for linear in [&mut attention.qkv, &mut attention.out, &mut feed_forward.up, &mut feed_forward.down] {
                linears.extend(linear.parameters_mut());
            }
        }
        let (norm, of_head) = head.norm_and_linears_mut();
        all.extend(norm.into_iter().flat_map(|norm| norm.parameters_mut()));
        linears.extend(of_head.into_iter().flat_map(Linear::parameters_mut));
        all.extend(linears);
        all
    }

    /// Allocates gradients and moments of all parameters.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn begin_training(&mut self, engine: &E) -> Result<()> {
        self.parameters_mut().into_iter().try_for_each(|parameter| parameter.begin_training(engine))
    }

    /// The last hidden states of sequences of tokens and their types, `[batch, positions, width]`.
    ///
    /// # Errors
    /// Tokens or types that do not fit the shape or do not exist; sequences longer than the context.
    pub fn hidden(&mut self, engine: &E, tokens: &[u32], types: &[u32], shape: BatchShape) -> Result<Vec<f32>> {
        let batch = BertBatch::of_sequences(engine, &self.config, (tokens, types), shape)?;
        let (x, saved) = self.forward(engine, &batch, shape)?;
        self.release(saved);
        let values = engine.read(&x)?;
        self.workspace.give([x]);
        Ok(values)
    }

    /// Adds the sum of the cross-entropies, in nats, of the samples' targets to `loss`.
    ///
    /// # Errors
    /// Samples that do not fit the shape, the task or the vocabulary.
    pub fn loss(&mut self, engine: &E, samples: BertSamples<'_>, loss: &mut E::Buffer) -> Result<()> {
        let (batch, shape) = (BertBatch::new(engine, &self.config, samples)?, samples.shape());
        let (x, saved) = self.forward(engine, &batch, shape)?;
        self.release(saved);
        self.head.loss(engine, &mut self.workspace, (&x, &batch), shape, loss)?;
        self.workspace.give([x]);
        Ok(())
    }

    /// A forward and a backward pass: adds to `loss` as [`Bert::loss`] does, and writes or adds the gradients, times `scale`, of all parameters.
    ///
    /// # Errors
    /// Those of [`Bert::loss`]; a model without [`Bert::begin_training`].
    pub fn gradients(
        &mut self,
        engine: &E,
        samples: BertSamples<'_>,
        (scale, accumulate): (f32, Accumulate),
        loss: &mut E::Buffer,
    ) -> Result<()> {
        let batch = BertBatch::new(engine, &self.config, samples)?;
        self.gradients_of(engine, &batch, samples.shape(), (scale, accumulate), loss, &mut |_| Ok(()))
    }

    /// [`Bert::gradients`] of samples in the engine's memory. `ready` receives gradients as they are complete: those of all parameters, each once, in an order that
    /// depends on the configuration alone.
    pub(crate) fn gradients_of(
        &mut self,
        engine: &E,
        batch: &BertBatch<E>,
        shape: BatchShape,
        (scale, accumulate): (f32, Accumulate),
        loss: &mut E::Buffer,
        ready: &mut dyn FnMut(Vec<&mut E::Buffer>) -> Result<()>,
    ) -> Result<()> {
        let (x, Saved { embeddings, layers }) = self.forward(engine, batch, shape)?;
        engine.begin_phase(StepPhase::Backward)?;
        let Bert { workspace, head, .. } = self;
        let mut dx = head.gradients(engine, workspace, (&x, batch), shape, (scale, accumulate), loss)?;
        workspace.give([x]);
        ready(gradients(head.complete_parameters_mut()))?;
        for (layer, (attention, feed_forward)) in self.layers.iter_mut().zip(layers).rev() {
            dx = layer.feed_forward.backward(engine, workspace, feed_forward, dx, accumulate)?;
            ready(gradients(layer.feed_forward.parameters_mut()))?;
            dx = layer.attention.backward(engine, workspace, attention, dx, accumulate)?;
            ready(gradients(layer.attention.parameters_mut()))?;
        }
        let table = head.table_mut();
        self.embeddings.backward(engine, workspace, (embeddings, batch, table), dx, accumulate)?;
        // A head whose weight is the embedding of tokens has its whole gradient only now.
        let rest = head.table_mut();
        ready(gradients(self.embeddings.parameters_mut().chain(rest)))
    }

    fn forward(&mut self, engine: &E, batch: &BertBatch<E>, shape: BatchShape) -> Result<(E::Buffer, Saved<E>)> {
        let BatchShape { batch: sequences, positions } = shape;
        if sequences == 0 || positions == 0 || positions > self.config.encoder.context() {
            let found = format!("{sequences} sequences of {positions} tokens");
            let expected = "at least one sequence of at least one token and at most the context";
            return Err(Error::Setting { what: "the batch", found, expected });
        }
        let (tokens, workspace) = (shape.tokens(), &mut self.workspace);
        let (mut x, embeddings) = self.embeddings.forward(engine, workspace, batch, self.head.table())?;
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let (y, attention) = layer.attention.forward(engine, workspace, x, shape)?;
            let (y, feed_forward) = layer.feed_forward.forward(engine, workspace, y, tokens)?;
            x = y;
            layers.push((attention, feed_forward));
        }
        Ok((x, Saved { embeddings, layers }))
    }

    fn release(&mut self, saved: Saved<E>) {
        saved.embeddings.release(&mut self.workspace);
        for (attention, feed_forward) in saved.layers {
            attention.release(&mut self.workspace);
            feed_forward.release(&mut self.workspace);
        }
    }
}

/// The gradients of parameters that train.
fn gradients<'a, E: Engine + 'a>(parameters: impl IntoIterator<Item = &'a mut Parameter<E>>) -> Vec<&'a mut E::Buffer> {
    parameters.into_iter().filter_map(Parameter::gradient_mut).collect()
}
