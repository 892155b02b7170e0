//! Making a vision transformer that trains.

use std::collections::HashMap;

use twofour::layer::Activation;

use super::{Vit, VitConfig};
use crate::{
    Result,
    block::{AttentionBlock, BlockHeads, FeedForwardBlock, FeedForwardFunction, Norm, Workspace},
    engine::Engine,
    linear::Linear,
    model::Layer,
    parameter::Parameter,
    random::Stream,
};

impl<E: Engine> Vit<E> {
    /// Standard deviation of the initial weights.
    const INITIAL_DEVIATION: f64 = 0.02;

    /// A model with random weights that depend on `config` and `seed` alone, whatever the engine: normal with deviation 0.02, as DINOv2's (Oquab et al., 2023).
    /// Biases are zero, gains one.
    ///
    /// # Errors
    /// A configuration that [`VitConfig::validate`] refuses; not enough memory.
    pub fn new(engine: &E, config: &VitConfig, seed: u64) -> Result<Self> {
        Self::build(engine, config, |name, shape| {
            let count: usize = shape.iter().product();
            if name.ends_with("bias") {
                return Ok(vec![0.0; count]);
            }
            if name.ends_with("norm.weight") {
                return Ok(vec![1.0; count]);
            }
            let stream = Stream::new(seed, name);
            Ok((0..count as u64).map(|i| (stream.normal(i) * Self::INITIAL_DEVIATION) as f32).collect())
        })
    }

    /// A dense model whose parameters have the values that `values(name, shape)` returns.
    ///
    /// # Errors
    /// Those of `values`, and those of [`Vit::new`].
    pub fn build(engine: &E, config: &VitConfig, values: impl Fn(&str, &[usize]) -> Result<Vec<f32>>) -> Result<Self> {
        config.validate()?;
        let VitConfig { width, heads, feed_forward, classes, .. } = *config;
        let parameter = |name: &str, shape: &[usize], computes: bool| {
            Parameter::new(engine, name, shape, &values(name, shape)?, computes)
        };
        let linear = |name: &str, out: usize, inputs: usize| -> Result<Linear<E>> {
            let weight = parameter(&format!("{name}.weight"), &[out, inputs], true)?;
            Linear::new(name, weight, Some(parameter(&format!("{name}.bias"), &[out], true)?))
        };
        let norm = |name: &str| -> Result<Norm<E>> {
            let gain = parameter(&format!("{name}.weight"), &[width], false)?;
            Norm::new(gain, Some(parameter(&format!("{name}.bias"), &[width], false)?), config.epsilon)
        };
        let function = match config.squared_relu {
            true => FeedForwardFunction::SquaredRelu,
            false => FeedForwardFunction::Plain(Activation::Gelu),
        };
        let heads = BlockHeads { heads, kv_heads: heads, head_dim: width / heads };
        let layer = |layer: usize| {
            let at = |part: &str| format!("blocks.{layer}.{part}");
            let (qkv, out) = (linear(&at("attn.qkv"), 3 * width, width)?, linear(&at("attn.out"), width, width)?);
            let up = linear(&at("mlp.up"), feed_forward, width)?;
            let down = linear(&at("mlp.down"), width, feed_forward)?;
            Ok(Layer {
                attention: AttentionBlock::full(norm(&at("attn.norm"))?, qkv, out, heads)?,
                feed_forward: FeedForwardBlock::new(norm(&at("mlp.norm"))?, up, down, function)?,
            })
        };
        Ok(Vit {
            positions: parameter("positions.weight", &[config.tokens(), width], true)?,
            patches: linear("patches", width, config.patch_len())?,
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            norm: norm("norm")?,
            head: linear("head", classes, width)?,
            images: None,
            placements: HashMap::new(),
            workspace: Workspace::default(),
            config: config.clone(),
        })
    }
}
