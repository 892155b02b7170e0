//! Making an encoder that trains.

use super::{
    Bert, BertConfig, BertLayer, EncoderTask,
    embeddings::BertEmbeddings,
    head::{BertHead, MaskedHead},
};
use crate::{
    Result,
    block::{Norm, PostNormAttention, PostNormFeedForward, Workspace},
    engine::Engine,
    linear::Linear,
    model::{NormConfig, TokenInput, TransformerConfig},
    parameter::Parameter,
    random::Stream,
};

/// Standard deviation of the initial weights.
const INITIAL_DEVIATION: f64 = 0.02;

/// The random value of a parameter: weights are normal with deviation 0.02, as BERT's; biases are zero, gains one.
pub(in crate::model) fn initial(seed: u64, name: &str, shape: &[usize]) -> Vec<f32> {
    let count: usize = shape.iter().product();
    if name.ends_with("bias") {
        return vec![0.0; count];
    }
    if name.ends_with("norm.weight") {
        return vec![1.0; count];
    }
    let stream = Stream::new(seed, name);
    (0..count as u64).map(|i| (stream.normal(i) * INITIAL_DEVIATION) as f32).collect()
}

impl<E: Engine> Bert<E> {
    /// A model with random weights that depend on `config` and `seed` alone, whatever the engine.
    ///
    /// # Errors
    /// A configuration that [`BertConfig::validate`] refuses; not enough memory.
    pub fn new(engine: &E, config: &BertConfig, seed: u64) -> Result<Self> {
        Self::build(engine, config, |name, shape| Ok(initial(seed, name, shape)))
    }

    /// A dense model whose parameters have the values that `values(name, shape)` returns.
    ///
    /// # Errors
    /// Those of `values`, and those of [`Bert::new`].
    pub fn build(engine: &E, config: &BertConfig, values: impl Fn(&str, &[usize]) -> Result<Vec<f32>>) -> Result<Self> {
        config.validate()?;
        let TransformerConfig { width, norm: NormConfig { epsilon, .. }, .. } = config.encoder;
        let (heads, feed_forward) = (config.encoder.attention.heads, config.encoder.feed_forward.hidden);
        let TokenInput { vocabulary, context, token_types, .. } = *config.encoder.tokens()?;
        let activation = config.activation()?;
        let parameter = |name: &str, shape: &[usize], computes: bool| {
            Parameter::new(engine, name, shape, &values(name, shape)?, computes)
        };
        let linear = |name: &str, out: usize, inputs: usize| -> Result<Linear<E>> {
            let weight = parameter(&format!("{name}.weight"), &[out, inputs], true)?;
            Linear::new(name, weight, Some(parameter(&format!("{name}.bias"), &[out], true)?))
        };
        let norm = |name: &str| -> Result<Norm<E>> {
            let of = |part: &str| parameter(&format!("{name}.{part}"), &[width], false);
            Norm::new(of("weight")?, Some(of("bias")?), epsilon)
        };
        let layer = |layer: usize| -> Result<BertLayer<E>> {
            let at = |part: &str| format!("blocks.{layer}.{part}");
            let qkv = linear(&at("attn.qkv"), 3 * width, width)?;
            let out = linear(&at("attn.out"), width, width)?;
            let up = linear(&at("mlp.up"), feed_forward, width)?;
            let down = linear(&at("mlp.down"), width, feed_forward)?;
            Ok(BertLayer {
                attention: PostNormAttention::new(qkv, out, norm(&at("attn.norm"))?, heads)?,
                feed_forward: PostNormFeedForward::new(up, down, norm(&at("mlp.norm"))?, activation)?,
            })
        };
        let (words, head) = match config.task {
            EncoderTask::MaskedTokens => {
                let (transform, norm) = (linear("head.transform", width, width)?, norm("head.norm")?);
                let decoder = linear("embedding", vocabulary, width)?;
                (None, BertHead::Masked(Box::new(MaskedHead::new(transform, norm, decoder, activation))))
            }
            EncoderTask::Answers => {
                let words = parameter("embedding.weight", &[vocabulary, width], true)?;
                (Some(words), BertHead::Answers(linear("answers", 2, width)?))
            }
        };
        let positions = parameter("positions.weight", &[context, width], true)?;
        let types = parameter("types.weight", &[token_types, width], true)?;
        let embeddings = BertEmbeddings::new(words, [positions, types], norm("embedding.norm")?);
        let layers = (0..config.encoder.layers).map(layer).collect::<Result<_>>()?;
        Ok(Bert { config: config.clone(), embeddings, layers, head, workspace: Workspace::default() })
    }
}
