//! Making a decoder that trains.

use std::sync::Arc;

use twofour::layer::Activation;

use super::{Gpt, Layer};
use crate::{
    Error, Result,
    block::{AttentionBlock, BlockHeads, FeedForwardBlock, FeedForwardFunction, Norm, Workspace},
    engine::{Engine, Nonlinearity},
    linear::Linear,
    model::{AttentionConfig, NormKind, Positions, TokenInput, TransformerConfig},
    parameter::Parameter,
    random::Stream,
};

impl<E: Engine> Gpt<E> {
    /// Standard deviation of the initial weights.
    const INITIAL_DEVIATION: f64 = 0.02;

    /// A model with random weights that depend on `config` and `seed` alone, whatever the engine.
    ///
    /// Weights are normal with deviation 0.02; those that end a block (`attn.out`, `mlp.down`) are divided by the root of
    /// the number of blocks, as in GPT-2 (Radford et al., 2019). Biases are zero, gains one.
    ///
    /// # Errors
    /// A configuration that [`TransformerConfig::validate`] refuses, or that engines do not support; not enough memory.
    pub fn new(engine: &E, config: impl Into<TransformerConfig>, seed: u64) -> Result<Self> {
        let config = config.into();
        let ending = 1.0 / ((2 * config.layers) as f64).sqrt();
        Self::build(engine, &config, |name, shape| {
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
    pub fn build(
        engine: &E,
        config: &TransformerConfig,
        values: impl Fn(&str, &[usize]) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        config.validate()?;
        let frequencies = trainable(config)?;
        let (width, TokenInput { vocabulary, context, .. }) = (config.width, *config.tokens()?);
        let AttentionConfig { heads, kv_heads, head_dim, .. } = config.attention;
        let parameter = |name: &str, shape: &[usize], computes: bool| {
            Parameter::new(engine, name, shape, &values(name, shape)?, computes)
        };
        let linear = |name: &str, out: usize, inputs: usize| -> Result<Linear<E>> {
            let weight = parameter(&format!("{name}.weight"), &[out, inputs], true)?;
            let bias = match config.has_bias(name) {
                false => None,
                true => Some(parameter(&format!("{name}.bias"), &[out], true)?),
            };
            Linear::new(name, weight, bias)
        };
        let norm = |name: &str| -> Result<Norm<E>> {
            let gain = parameter(&format!("{name}.weight"), &[width], false)?;
            let bias = match config.norm.kind {
                NormKind::Layer => Some(parameter(&format!("{name}.bias"), &[width], false)?),
                NormKind::RootMeanSquare => None,
            };
            Norm::new(gain, bias, config.norm.epsilon)
        };
        let function = function(config)?;
        let heads = BlockHeads { heads, kv_heads, head_dim };
        let rotary = Arc::new(engine.rotary(context, &frequencies)?);
        let layers = (0..config.layers)
            .map(|layer| {
                let at = |part: &str| format!("blocks.{layer}.{part}");
                let qkv = linear(&at("attn.qkv"), config.qkv_width(), width)?;
                let out = linear(&at("attn.out"), width, config.query_width())?;
                let up = linear(&at("mlp.up"), config.up_width(), width)?;
                let down = linear(&at("mlp.down"), width, config.feed_forward.hidden)?;
                Ok(Layer {
                    attention: AttentionBlock::new(norm(&at("attn.norm"))?, qkv, out, heads, rotary.clone())?,
                    feed_forward: FeedForwardBlock::new(norm(&at("mlp.norm"))?, up, down, function)?,
                })
            })
            .collect::<Result<_>>()?;
        let embedding = match config.is_tied() {
            true => None,
            false => Some(parameter("embedding.weight", &[vocabulary, width], true)?),
        };
        Ok(Gpt {
            embedding,
            layers,
            norm: norm("norm")?,
            head: linear("head", vocabulary, width)?,
            workspace: Workspace::default(),
            config: config.clone(),
        })
    }
}

/// Checks that engines train a decoder.
///
/// # Errors
/// [`Error::Unsupported`] with what they do not support: learned positions, norms of queries and keys, sliding windows below the context, some activations. [`Error::Setting`] for
/// a context whose rotary tables would be too large.
pub(crate) fn expect_trainable(config: &TransformerConfig) -> Result<()> {
    trainable(config)?;
    function(config)?;
    Ok(())
}

/// The frequencies of rotation of a decoder that engines support, or why they do not.
fn trainable(config: &TransformerConfig) -> Result<Vec<f64>> {
    // The rotary tables hold an angle for each position and pair of elements, and no tensor of a file vouches for them.
    const MOST_ANGLES: usize = 1 << 25;
    if config.context() * (config.attention.head_dim / 2) > MOST_ANGLES {
        let found = format!("{} with heads of {} elements", config.context(), config.attention.head_dim);
        let expected = "at most 2^26 elements of all positions of one head together";
        return Err(Error::Setting { what: "context", found, expected });
    }
    let unsupported = |what: &str| Error::Unsupported {
        engine: "training",
        what: what.to_owned(),
        remedy: "run such a model by `Inference` on the CPU",
    };
    let window = config.attention.windows.iter().flatten().min();
    match config.positions {
        _ if config.beyond_llama().is_some() => Err(unsupported(config.beyond_llama().unwrap_or_default())),
        _ if config.attention.head_norms => Err(unsupported("norms of queries and keys")),
        _ if window.is_some_and(|window| *window < config.context()) => {
            Err(unsupported("a sliding window below the context"))
        }
        Positions::Learned => Err(unsupported("learned positions")),
        Positions::Rotary(rope) => Ok(rope.frequencies(config.attention.head_dim)),
    }
}

/// What the feed-forward blocks apply.
fn function(config: &TransformerConfig) -> Result<FeedForwardFunction> {
    Ok(match config.feed_forward.activation {
        Nonlinearity::SquaredRelu if config.feed_forward.gated => {
            let what = "a gate of squared ReLU".to_owned();
            return Err(Error::Unsupported { engine: "training", what, remedy: "run such a model by `Inference`" });
        }
        function if config.feed_forward.gated => FeedForwardFunction::Gated(function),
        Nonlinearity::SquaredRelu => FeedForwardFunction::SquaredRelu,
        Nonlinearity::Relu => FeedForwardFunction::Plain(Activation::Relu),
        Nonlinearity::Gelu => FeedForwardFunction::Plain(Activation::Gelu),
        Nonlinearity::Silu => FeedForwardFunction::Plain(Activation::Silu),
        Nonlinearity::TanhGelu => {
            let what = "GELU by tanh without a gate".to_owned();
            return Err(Error::Unsupported { engine: "training", what, remedy: "run such a model by `Inference`" });
        }
    })
}
