//! One layer of a decoder for inference: an attention and a feed-forward block.

use twofour::kernel::{Activation, KernelElement};

use super::{
    attention::{attend, normalize_heads},
    cache::Cache,
    linear::Linear,
    norm::Norm,
    passes::{add, gated, narrowed, widened},
};
use crate::{
    Result,
    cpu::{nonlinearity, rope},
    engine::Nonlinearity,
    model::config::TransformerConfig,
};

/// Attention and feed-forward block.
#[derive(Debug)]
pub(crate) struct Layer<T: KernelElement> {
    pub(crate) attention_norm: Norm,
    pub(crate) qkv: Linear<T>,
    /// Norms of queries and keys, head by head.
    pub(crate) head_norms: Option<[Norm; 2]>,
    pub(crate) out: Linear<T>,
    pub(crate) feed_forward_norm: Norm,
    pub(crate) up: Linear<T>,
    pub(crate) down: Linear<T>,
}

/// A linear layer of a [`Layer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// Queries, keys, values.
    Qkv,
    /// The output of attention.
    Out,
    /// Into the hidden layer; with the gate, where there is one.
    Up,
    /// Out of the hidden layer.
    Down,
}

impl Role {
    /// All of a block, in the order of computation.
    pub(crate) const ALL: [Role; 4] = [Role::Qkv, Role::Out, Role::Up, Role::Down];

    /// The layer's name within its block.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Role::Qkv => "attn.qkv",
            Role::Out => "attn.out",
            Role::Up => "mlp.up",
            Role::Down => "mlp.down",
        }
    }
}

/// What sees the inputs of linear layers: `[tokens, in_features]`.
pub(crate) type Observer<'a, T> = &'a mut dyn FnMut(Role, &[T]);

/// Where new tokens are in their sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    /// The layer's number.
    pub(crate) layer: usize,
    /// Tokens before the new ones.
    pub(crate) position: usize,
    /// Cosines and sines of the new tokens' positions, where queries and keys are rotated.
    pub(crate) rotary: Option<&'a rope::Table>,
}

impl<T: KernelElement> Layer<T> {
    /// Bytes of the linear layers' weights.
    pub(crate) fn bytes(&self) -> usize {
        self.qkv.bytes() + self.out.bytes() + self.up.bytes() + self.down.bytes()
    }

    /// Runs new tokens `x: [tokens, width]` through the layer, in place; their keys and values are added to the cache.
    pub(crate) fn forward(
        &self,
        config: &TransformerConfig,
        x: &mut [f32],
        cache: &mut Cache<T>,
        place: Place<'_>,
        observe: Observer<'_, T>,
    ) -> Result<()> {
        let tokens = x.len() / config.width;
        let h = self.attention_norm.forward::<T>(x);
        observe(Role::Qkv, &h);
        let mut qkv = widened(&self.qkv.forward(&h, tokens, Activation::Identity)?);
        if let Some(norms) = &self.head_norms {
            normalize_heads(config, norms, &mut qkv);
        }
        let o: Vec<T> = attend(config, cache, place, &mut qkv);
        observe(Role::Out, &o);
        add(x, &self.out.forward(&o, tokens, Activation::Identity)?);
        let h = self.feed_forward_norm.forward::<T>(x);
        observe(Role::Up, &h);
        let h = self.hidden(config, &h, tokens)?;
        observe(Role::Down, &h);
        add(x, &self.down.forward(&h, tokens, Activation::Identity)?);
        Ok(())
    }

    /// The hidden layer of the feed-forward block, with its function applied.
    fn hidden(&self, config: &TransformerConfig, x: &[T], tokens: usize) -> Result<Vec<T>> {
        // What the kernels have in their epilogue.
        let fused = match config.feed_forward.activation {
            _ if config.feed_forward.gated => None,
            Nonlinearity::Relu => Some(Activation::Relu),
            Nonlinearity::Gelu => Some(Activation::Gelu),
            Nonlinearity::Silu => Some(Activation::Silu),
            Nonlinearity::TanhGelu | Nonlinearity::SquaredRelu => None,
        };
        let h = self.up.forward(x, tokens, fused.unwrap_or(Activation::Identity))?;
        if fused.is_some() {
            return Ok(h);
        }
        if config.feed_forward.gated {
            return Ok(gated(config.feed_forward.activation, config.feed_forward.hidden, &h));
        }
        let mut h = widened(&h);
        nonlinearity::in_place(config.feed_forward.activation, &mut h);
        Ok(narrowed(&h))
    }
}
