//! The byte-level GPT: construction, forward pass, loss and gradients.

use std::sync::Arc;

use twofour::layer::{Accumulate, Activation};

use super::{GptConfig, VOCABULARY};
use crate::{
    Error, Result,
    block::{AttentionBlock, BatchShape, FeedForwardBlock, LayerNorm, SavedAttention, SavedFeedForward, Workspace},
    engine::{Engine, Kind, OptimizerStep},
    linear::Linear,
    parameter::Parameter,
    random::Stream,
};

/// A byte-level GPT. Linear layers are dense or 2:4, each for itself.
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
    config: GptConfig,
    embedding: Parameter<E>,
    layers: Vec<Layer<E>>,
    norm: LayerNorm<E>,
    head: Linear<E>,
    workspace: Workspace<E>,
    has_squared_relu: bool,
}

/// One layer of a [`Gpt`].
#[derive(Debug)]
pub struct Layer<E: Engine> {
    /// Attention.
    pub attention: AttentionBlock<E>,
    /// Feed-forward.
    pub feed_forward: FeedForwardBlock<E>,
}

/// What the backward pass reads.
struct Saved<E: Engine> {
    layers: Vec<(SavedAttention<E>, SavedFeedForward<E>)>,
    x: E::Buffer,
    statistics: [E::Buffer; 2],
    normalized: E::Buffer,
}

impl<E: Engine> Gpt<E> {
    /// Standard deviation of the initial weights.
    const INITIAL_DEVIATION: f64 = 0.02;

    /// A model with random weights that depend on `config` and `seed` alone, whatever the engine.
    ///
    /// Weights are normal with deviation 0.02; those that end a block (`attn.out`, `mlp.down`) are divided by the root of
    /// the number of blocks, as in GPT-2 (Radford et al., 2019). Biases are zero, gains one.
    ///
    /// # Errors
    /// A configuration that [`GptConfig::validate`] refuses; not enough memory.
    pub fn new(engine: &E, config: &GptConfig, seed: u64) -> Result<Self> {
        let ending = 1.0 / ((2 * config.layers) as f64).sqrt();
        Self::build(engine, config, |name, shape| {
            let count: usize = shape.iter().product();
            if name.ends_with("bias") {
                return Ok(vec![0.0; count]);
            }
            if name.ends_with("norm.weight") {
                return Ok(vec![1.0; count]);
            }
            let ends_block = name.ends_with("attn.out.weight") || name.ends_with("mlp.down.weight");
            let deviation = if ends_block { Self::INITIAL_DEVIATION * ending } else { Self::INITIAL_DEVIATION };
            let stream = Stream::new(seed, name);
            Ok((0..count as u64).map(|i| (stream.normal(i) * deviation) as f32).collect())
        })
    }

    /// A dense model whose parameters have the values that `values(name, shape)` returns.
    ///
    /// # Errors
    /// Those of `values`, and those of [`Gpt::new`].
    pub fn build(engine: &E, config: &GptConfig, values: impl Fn(&str, &[usize]) -> Result<Vec<f32>>) -> Result<Self> {
        config.validate()?;
        let GptConfig { width, feed_forward, heads, context, .. } = *config;
        let parameter = |name: &str, shape: &[usize], computes: bool| {
            Parameter::new(engine, name, shape, &values(name, shape)?, computes)
        };
        let linear = |name: &str, out: usize, inputs: usize| -> Result<Linear<E>> {
            let weight = parameter(&format!("{name}.weight"), &[out, inputs], true)?;
            let bias = match has_bias(name) {
                false => None,
                true => Some(parameter(&format!("{name}.bias"), &[out], true)?),
            };
            Linear::new(name, weight, bias)
        };
        let norm = |name: &str| -> Result<LayerNorm<E>> {
            let gain = parameter(&format!("{name}.weight"), &[width], false)?;
            LayerNorm::new(gain, parameter(&format!("{name}.bias"), &[width], false)?)
        };
        let rotary = Arc::new(engine.rotary(context, width / heads)?);
        let layers = (0..config.layers)
            .map(|layer| {
                let at = |part: &str| format!("blocks.{layer}.{part}");
                let qkv = linear(&at("attn.qkv"), 3 * width, width)?;
                let out = linear(&at("attn.out"), width, width)?;
                let up = linear(&at("mlp.up"), feed_forward, width)?;
                let down = linear(&at("mlp.down"), width, feed_forward)?;
                Ok(Layer {
                    attention: AttentionBlock::new(norm(&at("attn.norm"))?, qkv, out, heads, rotary.clone())?,
                    feed_forward: FeedForwardBlock::new(norm(&at("mlp.norm"))?, up, down, Activation::Gelu)?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Gpt {
            config: *config,
            embedding: parameter("embedding.weight", &[VOCABULARY, width], true)?,
            layers,
            norm: norm("norm")?,
            head: linear("head", VOCABULARY, width)?,
            workspace: Workspace::default(),
            has_squared_relu: false,
        })
    }

    /// Replaces GELU by squared ReLU, `max(x, 0)²`, in all feed-forward blocks. The model's file says so.
    pub fn use_squared_relu(&mut self) {
        self.has_squared_relu = true;
        self.layers.iter_mut().for_each(|layer| layer.feed_forward.use_squared_relu());
    }

    /// Whether [`Gpt::use_squared_relu`] is in force.
    pub fn has_squared_relu(&self) -> bool {
        self.has_squared_relu
    }

    /// The sizes.
    pub fn config(&self) -> &GptConfig {
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
        let mut all = vec![&self.embedding];
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
        let mut all = vec![&mut self.embedding];
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

    /// An optimizer step of all parameters, by what `step(parameter)` says of each. The second argument of `step` is the linear layer's name where the
    /// parameter is its weight. Returns the sum of the changes of watched second moments.
    ///
    /// # Errors
    /// Those of [`Engine::adamw`].
    pub(crate) fn update(
        &mut self,
        engine: &E,
        step: impl Fn(&Parameter<E>, Option<&str>) -> OptimizerStep,
    ) -> Result<f64> {
        let own = step(&self.embedding, None);
        let mut changes = self.embedding.update(engine, &own, None)?;
        let norms = self.layers.iter_mut().flat_map(|Layer { attention, feed_forward }| {
            attention.norm.parameters_mut().into_iter().chain(feed_forward.norm.parameters_mut())
        });
        for parameter in norms.chain(self.norm.parameters_mut()) {
            let own = step(parameter, None);
            parameter.update(engine, &own, None)?;
        }
        for linear in self.linears_mut() {
            let own = step(linear.weight(), Some(linear.name()));
            changes += linear.update_weight(engine, &own)?;
            if let Some(bias) = linear.bias() {
                let own = step(bias, None);
                linear.update_bias(engine, &own)?;
            }
        }
        Ok(changes)
    }

    /// Scores of the next byte after each token, `[tokens, 256]`, and what was saved.
    fn forward(&mut self, engine: &E, ids: &E::Buffer, shape: BatchShape) -> Result<(E::Buffer, Saved<E>)> {
        let BatchShape { batch, positions } = shape;
        if batch == 0 || positions == 0 || positions > self.config.context {
            let found = format!("{batch} sequences of {positions} tokens");
            let expected = "at least one sequence of at least one token and at most the context";
            return Err(Error::Setting { what: "the batch", found, expected });
        }
        let (tokens, workspace) = (shape.tokens(), &mut self.workspace);
        let mut x = workspace.compute(engine, tokens * self.config.width)?;
        engine.embedding(self.embedding.compute(), self.config.width, ids, &mut x)?;
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let (y, attention) = layer.attention.forward(engine, workspace, x, shape)?;
            let (y, feed_forward) = layer.feed_forward.forward(engine, workspace, y, tokens)?;
            x = y;
            layers.push((attention, feed_forward));
        }
        let (normalized, statistics) = self.norm.forward(engine, workspace, &x, tokens)?;
        let mut logits = workspace.compute(engine, tokens * VOCABULARY)?;
        self.head.forward(engine, &normalized, tokens, &mut logits)?;
        Ok((logits, Saved { layers, x, statistics, normalized }))
    }

    fn release(&mut self, saved: Saved<E>) {
        for (attention, feed_forward) in saved.layers {
            attention.release(&mut self.workspace);
            feed_forward.release(&mut self.workspace);
        }
        self.workspace.give([saved.x, saved.normalized].into_iter().chain(saved.statistics));
    }

    fn ids(&mut self, engine: &E, ids: &[u32]) -> Result<E::Buffer> {
        let mut buffer = self.workspace.take(engine, Kind::Index, ids.len())?;
        engine.write_ids(&mut buffer, ids)?;
        Ok(buffer)
    }

    /// Scores of the next byte after each of `bytes` `[batch, positions]`: `[batch, positions, 256]`.
    ///
    /// # Errors
    /// Sequences longer than the context, bytes above 255.
    pub fn logits(&mut self, engine: &E, bytes: &[u32], shape: BatchShape) -> Result<Vec<f32>> {
        check_tokens("inputs", bytes, shape)?;
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
        check_tokens("inputs", bytes, shape)?;
        check_tokens("targets", targets, shape)?;
        let (ids, targets) = (self.ids(engine, bytes)?, self.ids(engine, targets)?);
        let (mut logits, saved) = self.forward(engine, &ids, shape)?;
        self.release(saved);
        engine.cross_entropy(VOCABULARY, &mut logits, &targets, None, loss)?;
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
        check_tokens("inputs", bytes, shape)?;
        check_tokens("targets", targets, shape)?;
        let tokens = shape.tokens();
        let (ids, targets) = (self.ids(engine, bytes)?, self.ids(engine, targets)?);
        let (mut d_logits, saved) = self.forward(engine, &ids, shape)?;
        engine.cross_entropy(VOCABULARY, &mut d_logits, &targets, Some(scale), loss)?;
        let Saved { layers, x, statistics, normalized } = saved;
        let workspace = &mut self.workspace;
        self.head.parameter_gradients(engine, &d_logits, &normalized, tokens, accumulate)?;
        let mut d_normalized = normalized;
        self.head.input_gradient(engine, &d_logits, tokens, &mut d_normalized)?;
        let mut dx = workspace.compute(engine, tokens * self.config.width)?;
        engine.clear(&mut dx)?;
        self.norm.backward(engine, (&x, &statistics), &d_normalized, &mut dx, accumulate)?;
        workspace.give([d_logits, d_normalized, x, targets].into_iter().chain(statistics));
        for (layer, (attention, feed_forward)) in self.layers.iter_mut().zip(layers).rev() {
            dx = layer.feed_forward.backward(engine, workspace, feed_forward, dx, accumulate)?;
            dx = layer.attention.backward(engine, workspace, attention, dx, accumulate)?;
        }
        let width = self.config.width;
        self.embedding.record(accumulate, |gradient, accumulate| {
            engine.embedding_gradient(&dx, width, &ids, accumulate, gradient)
        })?;
        workspace.give([dx, ids]);
        Ok(())
    }
}

/// Whether the linear layer of that name has a bias.
pub(super) fn has_bias(name: &str) -> bool {
    name != "head"
}

/// An error for tokens that do not fit the shape or are no bytes.
fn check_tokens(what: &'static str, ids: &[u32], shape: BatchShape) -> Result<()> {
    if ids.len() != shape.tokens() {
        return Err(Error::Length { what, expected: shape.tokens(), found: ids.len() });
    }
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= VOCABULARY) {
        None => Ok(()),
        Some((position, &token)) => Err(Error::Token { what, token, position, vocabulary: VOCABULARY }),
    }
}
