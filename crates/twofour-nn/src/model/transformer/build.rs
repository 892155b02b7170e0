//! Making a transformer that trains.

use std::{fmt, sync::Arc};

use super::{Layer, Task, Transformer};
use crate::{
    Result,
    block::{Attention, AttentionOptions, Block, BlockHeads, BlockNorms, FeedForward, HeadNorms, Norm, Workspace},
    engine::{Engine, Kind, ScoreOptions},
    linear::Linear,
    model::{AttentionConfig, NormConfig, NormKind, NormPlace, Rope, TransformerConfig},
    parameter::Parameter,
    random::Stream,
};

/// Standard deviation of initial weights.
pub(in crate::model) const INITIAL_DEVIATION: f64 = 0.02;

/// The values of a parameter of a name and a shape.
type Values<'a> = dyn Fn(&str, &[usize]) -> Result<Vec<f32>> + 'a;

/// Makes the parts of a model from the values of its parameters.
pub struct Builder<'a, E: Engine> {
    engine: &'a E,
    values: &'a Values<'a>,
    config: TransformerConfig,
    /// The tables of each rotation.
    rotary: Vec<(Rope, Arc<E::Rotary>)>,
}

impl<E: Engine> fmt::Debug for Builder<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("config", &self.config).finish_non_exhaustive()
    }
}

impl<'a, E: Engine> Builder<'a, E> {
    fn new(engine: &'a E, config: TransformerConfig, values: &'a Values<'a>) -> Result<Self> {
        let mut rotary: Vec<(Rope, Arc<E::Rotary>)> = vec![];
        for rope in (0..config.layers).filter_map(|layer| config.rope(layer)) {
            if rotary.iter().all(|(known, _)| known != rope) {
                let frequencies = rope.frequencies(config.attention.head_dim);
                rotary.push((rope.clone(), Arc::new(engine.rotary(config.context(), &frequencies)?)));
            }
        }
        Ok(Builder { engine, values, config, rotary })
    }

    /// The model.
    pub(in crate::model) fn config(&self) -> &TransformerConfig {
        &self.config
    }

    fn parameter(&self, name: &str, shape: &[usize], computes: bool) -> Result<Parameter<E>> {
        Ok(Parameter::new(self.engine, name, shape, &(self.values)(name, shape)?, computes)?)
    }

    /// A table of that many rows of the model's width.
    pub(in crate::model) fn table(&self, name: &str, rows: usize) -> Result<Parameter<E>> {
        self.parameter(name, &[rows, self.config.width], true)
    }

    /// A factor for each element of a row of the model's width, rounded to the compute type as transformers does.
    pub(in crate::model) fn factors(&self, factor: f32) -> Result<E::Buffer> {
        let mut rounded = self.engine.zeros(Kind::Compute, self.config.width)?;
        self.engine.write(&mut rounded, &vec![factor; self.config.width])?;
        let mut factors = self.engine.zeros(Kind::Wide, self.config.width)?;
        self.engine.write(&mut factors, &self.engine.read(&rounded)?)?;
        Ok(factors)
    }

    pub(in crate::model) fn linear(&self, name: &str, shape: (usize, usize), has_bias: bool) -> Result<Linear<E>> {
        let (out, inputs) = shape;
        let weight = self.parameter(&format!("{name}.weight"), &[out, inputs], true)?;
        let bias = has_bias.then(|| self.parameter(&format!("{name}.bias"), &[out], true)).transpose()?;
        Linear::new(name, weight, bias)
    }

    pub(in crate::model) fn norm(&self, name: &str) -> Result<Norm<E>> {
        self.norm_of(name, self.config.width)
    }

    fn norm_of(&self, name: &str, width: usize) -> Result<Norm<E>> {
        let NormConfig { kind, epsilon, .. } = self.config.norm;
        let vector = |part: &str| self.parameter(&format!("{name}.{part}"), &[width], false);
        Norm::new(vector("weight")?, (kind == NormKind::Layer).then(|| vector("bias")).transpose()?, epsilon)
    }

    fn norms(&self, part: &str) -> Result<BlockNorms<E>> {
        let norm = self.norm(&format!("{part}.norm"))?;
        Ok(match self.config.norm.place {
            // Of models that train none is parallel.
            NormPlace::Before | NormPlace::Parallel => BlockNorms::pre(norm),
            NormPlace::After => BlockNorms::post(norm),
            NormPlace::Around => BlockNorms::sandwich(norm, self.norm(&format!("{part}.post_norm"))?),
        })
    }

    fn layer(&self, layer: usize) -> Result<Layer<E>> {
        let (config, at) = (&self.config, |part: &str| format!("blocks.{layer}.{part}"));
        let linear =
            |part: &str, out: usize, inputs: usize| self.linear(&at(part), (out, inputs), config.has_bias(&at(part)));
        let (width, hidden) = (config.width, config.feed_forward.hidden);
        let AttentionConfig { heads, kv_heads, head_dim, is_causal, scale, soft_cap, .. } = config.attention;
        // A window of the whole context is none.
        let window = config.window(layer).filter(|window| *window < config.context());
        let (scores, rope) = (ScoreOptions { window, scale, soft_cap }, config.rope(layer));
        let rotary = self.rotary.iter().find(|(known, _)| Some(known) == rope).map(|(_, table)| table.clone());
        let attention = Attention::new(
            linear("attn.qkv", config.qkv_width(), width)?,
            linear("attn.out", width, config.query_width())?,
            BlockHeads { heads, kv_heads, head_dim },
            AttentionOptions { is_causal, scores, rotary },
        )?;
        let attention = match config.attention.head_norms {
            true => {
                let norm = |part: &str| self.norm_of(&at(part), head_dim);
                attention.with_norms(HeadNorms::new(norm("attn.query_norm")?, norm("attn.key_norm")?))?
            }
            false => attention,
        };
        let (up, down) = (linear("mlp.up", config.up_width(), width)?, linear("mlp.down", width, hidden)?);
        let feed_forward = FeedForward::new(up, down, config.feed_forward.activation, config.feed_forward.gated)?;
        Ok(Layer {
            attention: Block::new(self.norms(&at("attn"))?, attention)?,
            feed_forward: Block::new(self.norms(&at("mlp"))?, feed_forward)?,
        })
    }
}

impl<E: Engine> Layer<E> {
    /// The dense layer of a number of a model, whose parameters have the values that `values(name, shape)` returns.
    ///
    /// # Errors
    /// Those of `values`; not enough memory.
    pub(in crate::model) fn build(
        engine: &E,
        config: TransformerConfig,
        index: usize,
        values: impl Fn(&str, &[usize]) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        Builder::new(engine, config, &values)?.layer(index)
    }
}

impl<E: Engine, T: Task<E>> Transformer<E, T> {
    /// A model with random weights that depend on `config` and `seed` alone, whatever the engine.
    ///
    /// Weights are normal with deviation 0.02, as BERT's and DINOv2's; those of a decoder that end a block (`attn.out`,
    /// `mlp.down`) are divided by the root of the number of blocks, as in GPT-2 (Radford et al., 2019). Biases are
    /// zero, gains one.
    ///
    /// # Errors
    /// A description of no such model, or of one that does not train; not enough memory.
    pub fn new(engine: &E, config: impl Into<T::Config>, seed: u64) -> Result<Self> {
        let config = config.into();
        Self::build(engine, &config, |name, shape| Ok(normal(seed, name, shape, T::deviation(&config, name))))
    }

    /// A dense model whose parameters have the values that `values(name, shape)` returns.
    ///
    /// # Errors
    /// Those of `values`, and those of [`Transformer::new`].
    pub fn build(engine: &E, config: &T::Config, values: impl Fn(&str, &[usize]) -> Result<Vec<f32>>) -> Result<Self> {
        let builder = Builder::new(engine, T::transformer(config)?, &values)?;
        let TransformerConfig { layers, norm: NormConfig { place, .. }, .. } = builder.config;
        Ok(Transformer {
            config: config.clone(),
            task: T::build(&builder, config)?,
            layers: (0..layers).map(|layer| builder.layer(layer)).collect::<Result<_>>()?,
            norm: (place != NormPlace::After).then(|| builder.norm("norm")).transpose()?,
            workspace: Workspace::default(),
        })
    }
}

/// The random value of a parameter: weights are normal with this deviation, biases zero, gains one.
pub(in crate::model) fn normal(seed: u64, name: &str, shape: &[usize], deviation: f64) -> Vec<f32> {
    let count: usize = shape.iter().product();
    if name.ends_with("bias") {
        return vec![0.0; count];
    }
    if name.ends_with("norm.weight") {
        return vec![1.0; count];
    }
    let stream = Stream::new(seed, name);
    (0..count as u64).map(|i| (stream.normal(i) * deviation) as f32).collect()
}
