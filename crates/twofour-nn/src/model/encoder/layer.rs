//! One layer of an encoder: attention and feed-forward, a norm behind each.

use twofour::kernel::{Activation, KernelElement};

use super::{TransformerConfig, attention::attend};
use crate::{
    Result,
    cpu::nonlinearity,
    model::{
        config::NormKind,
        inference::{
            build::Parts,
            layer::{Observer, Role},
            linear::Linear,
            norm::Norm,
            passes::{add, narrowed, widened},
        },
    },
};

/// Attention and feed-forward block.
#[derive(Debug)]
pub(in crate::model) struct EncoderLayer<T: KernelElement> {
    qkv: Linear<T>,
    out: Linear<T>,
    attention_norm: Norm,
    up: Linear<T>,
    down: Linear<T>,
    feed_forward_norm: Norm,
}

impl<T: KernelElement> EncoderLayer<T> {
    /// The layer of that number.
    pub(in crate::model) fn build(config: &TransformerConfig, parts: &impl Parts<T>, layer: usize) -> Result<Self> {
        let (width, feed_forward) = (config.width, config.feed_forward.hidden);
        let at = |part: &str| format!("blocks.{layer}.{part}");
        let norm = |name: &str| {
            Norm::read(NormKind::Layer, config.norm.epsilon, |part| parts.vector(&at(&format!("{name}.{part}")), width))
        };
        Ok(EncoderLayer {
            qkv: parts.linear(&at("attn.qkv"), (3 * width, width))?,
            out: parts.linear(&at("attn.out"), (width, width))?,
            attention_norm: norm("attn.norm")?,
            up: parts.linear(&at("mlp.up"), (feed_forward, width))?,
            down: parts.linear(&at("mlp.down"), (width, feed_forward))?,
            feed_forward_norm: norm("mlp.norm")?,
        })
    }

    /// Bytes of the linear layers' weights.
    pub(in crate::model) fn bytes(&self) -> usize {
        self.qkv.bytes() + self.out.bytes() + self.up.bytes() + self.down.bytes()
    }

    /// Runs sequences of these lengths, `x: [tokens, width]` one after the other, through the layer, in place.
    pub(in crate::model) fn forward(
        &self,
        config: &TransformerConfig,
        x: &mut Vec<f32>,
        lengths: &[usize],
        observe: Observer<'_, T>,
    ) -> Result<()> {
        let tokens = x.len() / config.width;
        let h: Vec<T> = narrowed(x);
        observe(Role::Qkv, &h);
        let qkv = widened(&self.qkv.forward(&h, tokens, Activation::Identity)?);
        let o: Vec<T> = attend([config.width, config.attention.heads], &qkv, lengths, |_, _| {});
        observe(Role::Out, &o);
        add(x, &self.out.forward(&o, tokens, Activation::Identity)?);
        *x = self.attention_norm.normalized(x);
        let h: Vec<T> = narrowed(x);
        observe(Role::Up, &h);
        let mut h = widened(&self.up.forward(&h, tokens, Activation::Identity)?);
        nonlinearity::in_place(config.feed_forward.activation, &mut h);
        let h: Vec<T> = narrowed(&h);
        observe(Role::Down, &h);
        add(x, &self.down.forward(&h, tokens, Activation::Identity)?);
        *x = self.feed_forward_norm.normalized(x);
        Ok(())
    }
}
