//! One layer of an image encoder: attention and feed-forward, a norm before each.

use twofour::{
    Arithmetic,
    kernel::{Activation, KernelElement},
};

use super::{TransformerConfig, relative::RelativePositions, windows::WindowGrid};
use crate::{
    Result,
    cpu::nonlinearity,
    model::{
        config::NormKind,
        encoder::attend,
        inference::{
            build::Parts,
            linear::Linear,
            norm::Norm,
            passes::{gated, narrowed, widened},
        },
    },
};

/// Attention and feed-forward block.
#[derive(Debug)]
pub(super) struct ImageLayer<T: KernelElement> {
    attention_norm: Norm,
    qkv: Linear<T>,
    relative: Option<RelativePositions>,
    out: Linear<T>,
    attention_scale: Option<Vec<f32>>,
    feed_forward_norm: Norm,
    up: Linear<T>,
    down: Linear<T>,
    feed_forward_scale: Option<Vec<f32>>,
    windows: Option<WindowGrid>,
}

impl<T: KernelElement> ImageLayer<T> {
    /// The layer of that number.
    pub(super) fn build(config: &TransformerConfig, parts: &impl Parts<T>, layer: usize) -> Result<Self> {
        let (width, head_dim, feed_forward) = (config.width, config.attention.head_dim, config.feed_forward.hidden);
        let up = config.up_width();
        let at = |part: &str| format!("blocks.{layer}.{part}");
        let norm = |name: &str| {
            Norm::read(NormKind::Layer, config.norm.epsilon, |part| parts.vector(&at(&format!("{name}.{part}")), width))
        };
        let scale = |name: &str| config.layer_scale.then(|| parts.vector(&at(name), width)).transpose();
        let relative = || RelativePositions::read(parts, at, config.span(layer), head_dim);
        let linear = |name: &str, shape| {
            let linear = parts.linear(&at(name), shape);
            linear.map_err(|error| error.in_layer(at(name)))
        };
        Ok(ImageLayer {
            attention_norm: norm("attn.norm")?,
            qkv: linear("attn.qkv", (3 * width, width))?,
            relative: config.attention.relative_positions.then(relative).transpose()?,
            out: linear("attn.out", (width, width))?,
            attention_scale: scale("attn.scale")?,
            feed_forward_norm: norm("mlp.norm")?,
            up: linear("mlp.up", (up, width))?,
            down: linear("mlp.down", (width, feed_forward))?,
            feed_forward_scale: scale("mlp.scale")?,
            windows: WindowGrid::of(config, layer),
        })
    }

    /// Bytes of the linear layers' weights.
    pub(super) fn bytes(&self) -> usize {
        self.qkv.bytes() + self.out.bytes() + self.up.bytes() + self.down.bytes()
    }

    /// Runs images' tokens `x: [images · tokens, width]` through the layer, in place.
    pub(super) fn forward(&self, config: &TransformerConfig, x: &mut [f32]) -> Result<()> {
        let tokens = x.len() / config.width;
        let h: Vec<T> = self.attention_norm.forward(x);
        let o = match self.windows {
            Some(windows) => windows
                .merge(&self.attend(config, &windows.partition(&h, config.width), windows.positions())?, config.width),
            None => self.attend(config, &h, config.context())?,
        };
        add(x, &self.out.forward(&o, tokens, Activation::Identity)?, self.attention_scale.as_deref());
        let h: Vec<T> = self.feed_forward_norm.forward(x);
        let h = self.up.forward(&h, tokens, Activation::Identity)?;
        let h: Vec<T> = if config.feed_forward.gated {
            gated(config.feed_forward.activation, config.feed_forward.hidden, &h)
        } else {
            let mut h = widened(&h);
            nonlinearity::in_place(config.feed_forward.activation, &mut h);
            narrowed(&h)
        };
        add(x, &self.down.forward(&h, tokens, Activation::Identity)?, self.feed_forward_scale.as_deref());
        Ok(())
    }

    /// Attention of sequences of so many positions, each over itself, before the output projection.
    fn attend(&self, config: &TransformerConfig, h: &[T], positions: usize) -> Result<Vec<T>> {
        let (width, heads, head_dim) = (config.width, config.attention.heads, config.attention.head_dim);
        let tokens = h.len() / width;
        let qkv = widened(&self.qkv.forward(h, tokens, Activation::Identity)?);
        let lengths = vec![positions; tokens / positions];
        Ok(attend([width, heads], &qkv, &lengths, |queries, scores| {
            if let Some(relative) = &self.relative {
                relative.add(queries, (head_dim, 3 * width), scores);
            }
        }))
    }
}

/// `x ← x + scale ⊙ y`, the factors one for each column.
fn add<T: Arithmetic>(x: &mut [f32], y: &[T], scale: Option<&[f32]>) {
    match scale {
        None => x.iter_mut().zip(y).for_each(|(x, y)| *x += y.to_f32()),
        Some(scale) => {
            for (x, y) in x.chunks_exact_mut(scale.len()).zip(y.chunks_exact(scale.len())) {
                x.iter_mut().zip(y).zip(scale).for_each(|((x, y), scale)| *x += scale * y.to_f32());
            }
        }
    }
}
