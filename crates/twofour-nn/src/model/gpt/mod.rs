//! The decoder that trains: forward pass, loss and gradients.

mod build;
mod perplexity;
mod trained;

pub(crate) use build::expect_trainable;

use twofour::layer::Accumulate;

use super::{
    Layer, TransformerConfig,
    layers::{self, SavedLayer, gradients},
};
use crate::{
    Error, Result,
    block::{BatchShape, Norm, Normalized, Workspace},
    engine::{Engine, Kind, Nonlinearity, StepPhase},
    linear::Linear,
    parameter::Parameter,
};

/// A decoder with rotary positions, such as a byte-level GPT or a LLaMA. Linear layers are dense or 2:4, each for itself.
///
/// ```
/// use twofour_nn::{block::BatchShape, engine::cpu::CpuEngine, model::{Gpt, GptConfig}};
/// let config = GptConfig { layers: 2, width: 32, heads: 2, context: 16, feed_forward: 64 };
/// let mut model = Gpt::new(&CpuEngine, &config, 0)?;
/// let bytes: Vec<u32> = b"two of four".iter().map(|&byte| byte.into()).collect();
/// let logits = model.logits(&CpuEngine, &bytes, BatchShape { batch: 1, positions: 11 })?;
/// assert_eq!(logits.len(), 11 * 256);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Gpt<E: Engine> {
    config: TransformerConfig,
    /// None where it is the head's weight.
    embedding: Option<Parameter<E>>,
    layers: Vec<Layer<E>>,
    norm: Norm<E>,
    head: Linear<E>,
    workspace: Workspace<E>,
}

/// What the backward pass reads.
struct Saved<E: Engine> {
    layers: Vec<SavedLayer<E>>,
    output: Normalized<E>,
}

impl<E: Engine> Gpt<E> {
    /// Replaces the activation of all feed-forward blocks by squared ReLU, `max(x, 0)²`. The model's description says so from then on, and its file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for gated feed-forward blocks.
    pub fn use_squared_relu(&mut self) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| layer.feed_forward.use_squared_relu())?;
        self.config.feed_forward.activation = Nonlinearity::SquaredRelu;
        Ok(())
    }

    /// The sizes.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// The layers, first to last.
    pub fn layers(&self) -> &[Layer<E>] {
        &self.layers
    }

    /// The linear layers, in the order of computation.
    pub fn linears(&self) -> impl Iterator<Item = &Linear<E>> {
        self.layers
            .iter()
            .flat_map(|Layer { attention, feed_forward }| {
                [&attention.qkv, &attention.out, &feed_forward.up, &feed_forward.down]
            })
            .chain([&self.head])
    }

    /// The linear layers for changing them.
    pub fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear<E>> {
        self.layers
            .iter_mut()
            .flat_map(|Layer { attention, feed_forward }| {
                [&mut attention.qkv, &mut attention.out, &mut feed_forward.up, &mut feed_forward.down]
            })
            .chain([&mut self.head])
    }

    /// All parameters in a fixed order: the embedding, the norms, the linear layers.
    pub fn parameters(&self) -> Vec<&Parameter<E>> {
        let mut all: Vec<_> = self.embedding.iter().collect();
        for Layer { attention, feed_forward } in &self.layers {
            all.extend(attention.norm.parameters());
            all.extend(feed_forward.norm.parameters());
        }
        all.extend(self.norm.parameters());
        all.extend(self.linears().flat_map(|linear| [Some(linear.weight()), linear.bias()]).flatten());
        all
    }

    /// All parameters for changing them, in the order of [`Gpt::parameters`]. After a change of a 2:4 layer's weight, call [`Linear::refresh`].
    pub fn parameters_mut(&mut self) -> Vec<&mut Parameter<E>> {
        let mut all: Vec<_> = self.embedding.iter_mut().collect();
        let mut linears = vec![];
        for Layer { attention, feed_forward } in &mut self.layers {
            all.extend(attention.norm.parameters_mut());
            all.extend(feed_forward.norm.parameters_mut());
            for linear in [&mut attention.qkv, &mut attention.out, &mut feed_forward.up, &mut feed_forward.down] {
                linears.extend(linear.parameters_mut());
            }
        }
        all.extend(self.norm.parameters_mut());
        all.extend(linears);
        all.extend(self.head.parameters_mut());
        all
    }

    /// Allocates gradients and moments of all parameters.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn begin_training(&mut self, engine: &E) -> Result<()> {
        self.parameters_mut().into_iter().try_for_each(|parameter| parameter.begin_training(engine))
    }

    /// Scores of the next byte after each token, `[tokens, 256]`, and what was saved.
    fn forward(&mut self, engine: &E, ids: &E::Buffer, shape: BatchShape) -> Result<(E::Buffer, Saved<E>)> {
        let BatchShape { batch, positions } = shape;
        if batch == 0 || positions == 0 || positions > self.config.context() {
            let found = format!("{batch} sequences of {positions} tokens");
            let expected = "at least one sequence of at least one token and at most the context";
            return Err(Error::Setting { what: "the batch", found, expected });
        }
        let (tokens, workspace) = (shape.tokens(), &mut self.workspace);
        let mut x = workspace.compute(engine, tokens * self.config.width)?;
        let table = self.embedding.as_ref().unwrap_or(self.head.weight());
        engine.embedding(table.compute(), self.config.width, ids, &mut x)?;
        let (output, layers) = layers::forward(engine, workspace, (&self.layers, &self.norm), x, shape)?;
        let mut logits = workspace.compute(engine, tokens * self.config.vocabulary())?;
        self.head.forward(engine, &output.y, tokens, &mut logits)?;
        Ok((logits, Saved { layers, output }))
    }

    fn release(&mut self, saved: Saved<E>) {
        layers::release(&mut self.workspace, saved.layers);
        self.workspace.give(saved.output.into_buffers());
    }

    fn ids(&mut self, engine: &E, ids: &[u32]) -> Result<E::Buffer> {
        let mut buffer = self.workspace.take(engine, Kind::Index, ids.len())?;
        engine.write_ids(&mut buffer, ids)?;
        Ok(buffer)
    }

    /// Scores of the next byte after each of `bytes` `[batch, positions]`: `[batch, positions, vocabulary]`.
    ///
    /// # Errors
    /// Sequences longer than the context, tokens outside the vocabulary.
    pub fn logits(&mut self, engine: &E, bytes: &[u32], shape: BatchShape) -> Result<Vec<f32>> {
        self.check_tokens("inputs", bytes, shape)?;
        let ids = self.ids(engine, bytes)?;
        let (logits, saved) = self.forward(engine, &ids, shape)?;
        self.release(saved);
        let values = engine.read(&logits)?;
        self.workspace.give([logits, ids]);
        Ok(values)
    }

    /// Adds the sum of the cross-entropies, in nats, of predicting `targets` from `bytes`, both `[batch, positions]`, to `loss`.
    ///
    /// # Errors
    /// Those of [`Gpt::logits`].
    pub fn loss(
        &mut self,
        engine: &E,
        (bytes, targets): (&[u32], &[u32]),
        shape: BatchShape,
        loss: &mut E::Buffer,
    ) -> Result<()> {
        self.check_tokens("inputs", bytes, shape)?;
        self.check_tokens("targets", targets, shape)?;
        let (ids, targets) = (self.ids(engine, bytes)?, self.ids(engine, targets)?);
        let (mut logits, saved) = self.forward(engine, &ids, shape)?;
        self.release(saved);
        engine.cross_entropy(self.config.vocabulary(), &mut logits, &targets, None, loss)?;
        self.workspace.give([logits, ids, targets]);
        Ok(())
    }

    /// A forward and a backward pass: adds to `loss` as [`Gpt::loss`] does, and writes or adds the gradients, times `scale`, of all parameters.
    ///
    /// # Errors
    /// Those of [`Gpt::logits`]; a model without [`Gpt::begin_training`].
    pub fn gradients(
        &mut self,
        engine: &E,
        (bytes, targets): (&[u32], &[u32]),
        shape: BatchShape,
        (scale, accumulate): (f32, Accumulate),
        loss: &mut E::Buffer,
    ) -> Result<()> {
        self.check_tokens("inputs", bytes, shape)?;
        self.check_tokens("targets", targets, shape)?;
        let (ids, targets) = (self.ids(engine, bytes)?, self.ids(engine, targets)?);
        self.gradients_of(engine, (&ids, &targets), shape, (scale, accumulate), loss, &mut |_| Ok(()))?;
        self.workspace.give([ids, targets]);
        Ok(())
    }

    /// [`Gpt::gradients`] of tokens that are in the engine's memory, and known to be in the vocabulary. `ready` receives gradients as they are complete: those of
    /// all parameters, each once, in an order that depends on the configuration alone.
    pub(crate) fn gradients_of(
        &mut self,
        engine: &E,
        (ids, targets): (&E::Buffer, &E::Buffer),
        shape: BatchShape,
        (scale, accumulate): (f32, Accumulate),
        loss: &mut E::Buffer,
        ready: &mut dyn FnMut(Vec<&mut E::Buffer>) -> Result<()>,
    ) -> Result<()> {
        let tokens = shape.tokens();
        let (mut d_logits, saved) = self.forward(engine, ids, shape)?;
        engine.cross_entropy(self.config.vocabulary(), &mut d_logits, targets, Some(scale), loss)?;
        engine.begin_phase(StepPhase::Backward)?;
        let Saved { layers, output: Normalized { x, y: normalized, statistics } } = saved;
        let workspace = &mut self.workspace;
        self.head.parameter_gradients(engine, &d_logits, &normalized, tokens, accumulate)?;
        let mut d_normalized = normalized;
        self.head.input_gradient(engine, &d_logits, tokens, &mut d_normalized)?;
        let mut dx = workspace.compute(engine, tokens * self.config.width)?;
        engine.clear(&mut dx)?;
        self.norm.backward(engine, (&x, &statistics), &d_normalized, &mut dx, accumulate)?;
        workspace.give([d_logits, d_normalized, x].into_iter().chain(statistics.into_buffers()));
        // A head that is the embedding gets the rest of its gradient at the end.
        let head = self.embedding.is_some().then_some(&mut self.head);
        ready(gradients(self.norm.parameters_mut().chain(head.into_iter().flat_map(Linear::parameters_mut))))?;
        let dx = layers::backward(engine, workspace, (&mut self.layers, layers), dx, accumulate, ready)?;
        let width = self.config.width;
        // A head that is the embedding has a gradient already.
        let (table, accumulate) = match &mut self.embedding {
            Some(embedding) => (embedding, accumulate),
            None => (self.head.weight_mut(), Accumulate::Add),
        };
        table.record(accumulate, |gradient, accumulate| {
            engine.embedding_gradient(&dx, width, ids, accumulate, gradient)
        })?;
        workspace.give([dx]);
        match &mut self.embedding {
            Some(embedding) => ready(gradients([embedding])),
            None => ready(gradients(self.head.parameters_mut())),
        }
    }

    /// An error for tokens that do not fit the shape or are not in the vocabulary.
    fn check_tokens(&self, what: &'static str, ids: &[u32], shape: BatchShape) -> Result<()> {
        if ids.len() != shape.tokens() {
            return Err(Error::Length { what, expected: shape.tokens(), found: ids.len() });
        }
        let vocabulary = self.config.vocabulary();
        match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocabulary) {
            None => Ok(()),
            Some((position, &token)) => Err(Error::Token { what, token, position, vocabulary }),
        }
    }
}
