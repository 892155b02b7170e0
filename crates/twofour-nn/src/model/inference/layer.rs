//! One layer of a model for inference: an attention and a feed-forward block.

use std::ops::ControlFlow;

use twofour::kernel::{Activation, KernelElement};

use super::{
    alibi::Slopes,
    attention::{Seen, attend},
    experts::Experts,
    feed_forward::FeedForward,
    latent::Latents,
    linear::Linear,
    norm::{Norm, Residual, normalize_heads},
    passes::widened,
    relative::RelativePositions,
    scores::Added,
    windows::WindowGrid,
};
use crate::{
    Result,
    model::config::{NormPlace, TransformerConfig},
};

/// Attention and feed-forward block.
#[derive(Debug)]
pub(crate) struct Layer<T: KernelElement> {
    /// The layer's number.
    pub(super) index: usize,
    pub(super) attention: Residual,
    pub(super) qkv: Linear<T>,
    /// What makes queries, keys and values of latents.
    pub(super) latents: Option<Latents<T>>,
    /// Norms of queries and keys, head by head.
    pub(super) head_norms: Option<[Norm; 2]>,
    pub(super) relative: Option<RelativePositions>,
    /// The score of each head's sink.
    pub(super) sinks: Option<Vec<f32>>,
    /// The slopes of ALiBi.
    pub(super) slopes: Option<Slopes>,
    /// How the tokens of an image are cut into windows.
    pub(super) windows: Option<WindowGrid>,
    pub(super) out: Linear<T>,
    pub(super) feed_forward: Residual,
    pub(super) hidden: FeedForward<T>,
}

/// A linear layer of a [`Layer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    /// Queries, keys, values; or their latents.
    Qkv,
    /// Queries, keys and values of latents.
    Latents,
    /// The output of attention.
    Out,
    /// Into the hidden layer; with the gate, where there is one.
    Up,
    /// Out of the hidden layer.
    Down,
}

impl Role {
    /// All of a block without latents, in the order of computation.
    pub(crate) const ALL: [Role; 4] = [Role::Qkv, Role::Out, Role::Up, Role::Down];

    /// All of a block of latents.
    const OF_LATENTS: [Role; 5] = [Role::Qkv, Role::Latents, Role::Out, Role::Up, Role::Down];

    /// All of a block, in the order of computation.
    pub(crate) fn of(config: &TransformerConfig) -> &'static [Role] {
        if config.attention.latent.is_some() { &Self::OF_LATENTS } else { &Self::ALL }
    }

    /// The layer's name within its block; of latents that of keys and values.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Role::Qkv => "attn.qkv",
            Role::Latents => "attn.key_value",
            Role::Out => "attn.out",
            Role::Up => "mlp.up",
            Role::Down => "mlp.down",
        }
    }
}

/// What sees the inputs of linear layers, `[tokens, in_features]`. After a break the layer computes no further.
pub(crate) type Observer<'a, T> = &'a mut dyn FnMut(Role, &[T]) -> ControlFlow<()>;

/// What sees the products of a linear layer, `[tokens, out_features]`.
pub(crate) type Outputs<'a> = &'a mut dyn FnMut(&[f32]);

/// The observer that sees nothing.
pub(crate) fn unobserved<T>(_: Role, _: &[T]) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

impl<T: KernelElement> Layer<T> {
    /// Bytes of the linear layers' weights.
    pub(crate) fn bytes(&self) -> usize {
        let of_latents = self.latents.as_ref().map_or(0, Latents::bytes);
        self.qkv.bytes() + of_latents + self.out.bytes() + self.hidden.bytes()
    }

    /// Runs tokens `x: [tokens, width]` through the layer, in place. Where the observer breaks, `x` is of no more use.
    pub(crate) fn forward(
        &self,
        config: &TransformerConfig,
        x: &mut [f32],
        mut seen: Seen<'_, T>,
        observe: Observer<'_, T>,
    ) -> Result<()> {
        let mut between = vec![];
        for role in Role::of(config).iter().copied() {
            let h = self.input(config, role, x, between);
            if observe(role, &h).is_break() {
                return Ok(());
            }
            between = self.step(config, role, &h, x, seen.again(), None)?;
        }
        Ok(())
    }

    /// What a linear layer reads, from the residual stream `x` or from what the layer before it returned.
    pub(crate) fn input(&self, config: &TransformerConfig, role: Role, x: &[f32], between: Vec<T>) -> Vec<T> {
        match role {
            Role::Qkv => self.attention.input(x),
            Role::Up if config.norm.place != NormPlace::Parallel => self.feed_forward.input(x),
            Role::Latents | Role::Out | Role::Up | Role::Down => between,
        }
    }

    /// The experts, where the feed-forward block has some.
    pub(crate) fn experts(&self) -> Option<&Experts<T>> {
        match &self.hidden {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        }
    }

    /// What reads latents, where the attention block has some.
    pub(crate) fn latents(&self) -> Option<&Latents<T>> {
        self.latents.as_ref()
    }

    /// What the feed-forward block reads of the residual stream in front of it.
    pub(crate) fn feed_forward_input(&self, x: &[f32]) -> Vec<T> {
        self.feed_forward.input(x)
    }

    /// Computes a linear layer from its input `h`, with what follows it up to the next linear layer. Returns what that
    /// one reads, unless it reads the residual stream `x`, to which the output is added. `outputs` sees the products of
    /// such a layer, without its bias; experts have none in common.
    pub(crate) fn step(
        &self,
        config: &TransformerConfig,
        role: Role,
        h: &[T],
        x: &mut [f32],
        seen: Seen<'_, T>,
        outputs: Option<Outputs<'_>>,
    ) -> Result<Vec<T>> {
        let tokens = x.len() / config.width;
        match role {
            Role::Qkv => match self.windows {
                None if self.latents.is_some() => self.latents_of(config, h),
                None => {
                    let qkv = widened(&self.qkv.forward(h, tokens, Activation::Identity)?);
                    Ok(self.attend(config, qkv, seen))
                }
                Some(windows) => {
                    let h = windows.partition(h, config.width);
                    let positions = windows.positions();
                    let lengths = vec![positions; h.len() / (positions * config.width)];
                    let qkv = widened(&self.qkv.forward(&h, h.len() / config.width, Activation::Identity)?);
                    Ok(windows.merge(&self.attend(config, qkv, Seen::Sequences(&lengths)), config.width))
                }
            },
            Role::Latents => match &self.latents {
                Some(latents) => Ok(latents.values(config, &self.attend(config, latents.expanded(config, h)?, seen))),
                None => Ok(vec![]),
            },
            Role::Out => {
                // Side by side, both blocks read the same.
                let beside = match config.norm.place {
                    NormPlace::Parallel => self.feed_forward.input(x),
                    _ => vec![],
                };
                add_products((&self.out, &self.attention), h, x, tokens, outputs)?;
                Ok(beside)
            }
            Role::Up => match &self.hidden {
                FeedForward::Dense(layer) => layer.hidden(config, h, tokens),
                FeedForward::Experts(experts) => experts.hidden(config, h, tokens),
            },
            Role::Down => {
                match &self.hidden {
                    FeedForward::Dense(layer) => {
                        add_products((&layer.down, &self.feed_forward), h, x, tokens, outputs)?;
                    }
                    FeedForward::Experts(experts) => {
                        let sums = experts.outputs(&self.feed_forward.input(x), h, tokens)?;
                        self.feed_forward.add(x, &sums);
                    }
                }
                Ok(vec![])
            }
        }
    }

    /// The latents of what the attention block reads, normalized; nothing where it has none.
    pub(crate) fn latents_of(&self, config: &TransformerConfig, h: &[T]) -> Result<Vec<T>> {
        let Some(latents) = &self.latents else { return Ok(vec![]) };
        let first = self.qkv.forward(h, h.len() / config.width, Activation::Identity)?;
        Ok(latents.normalized(config, widened(&first)))
    }

    /// Attention of `qkv: [tokens, qkv_width]` before the output projection, `[tokens, query_width]`.
    fn attend(&self, config: &TransformerConfig, mut qkv: Vec<f32>, seen: Seen<'_, T>) -> Vec<T> {
        if let Some(norms) = &self.head_norms {
            normalize_heads(config, norms, &mut qkv);
        }
        if let Some(bound) = config.attention.qkv_bound {
            qkv.iter_mut().for_each(|value| *value = value.clamp(-bound, bound));
        }
        let added =
            Added { relative: self.relative.as_ref(), sinks: self.sinks.as_deref(), slopes: self.slopes.as_ref() };
        attend((config, self.index), added, seen, &mut qkv)
    }
}

/// Adds the products of a layer that ends a block to the residual stream.
fn add_products<T: KernelElement>(
    (linear, residual): (&Linear<T>, &Residual),
    h: &[T],
    x: &mut [f32],
    tokens: usize,
    outputs: Option<Outputs<'_>>,
) -> Result<()> {
    let y = linear.forward(h, tokens, Activation::Identity)?;
    if let Some(outputs) = outputs {
        outputs(&without_bias(linear, &y, h.len() / tokens.max(1))?);
    }
    residual.add(x, &y);
    Ok(())
}

/// The products of a layer's weight alone in its outputs `y`.
fn without_bias<T: KernelElement>(linear: &Linear<T>, y: &[T], inputs: usize) -> Result<Vec<f32>> {
    let bias = widened(&linear.forward(&vec![T::ZERO; inputs], 1, Activation::Identity)?);
    let mut products = widened(y);
    for row in products.chunks_exact_mut(bias.len().max(1)) {
        row.iter_mut().zip(&bias).for_each(|(value, bias)| *value -= bias);
    }
    Ok(products)
}
