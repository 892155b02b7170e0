//! One block of a model of text, in f32, from one input of its linear layers to the next: for calibration.

use std::cell::RefCell;

use twofour::DataType;
use twofour_cuda::layer::DeviceBuffer;
use twofour_transformer::{
    ScoreOptions,
    cuda::{
        Rotary, activation_forward, add_in_place,
        decode::{CacheShape, CachedAttention, CachedTokens, HeadNorms, Normalized},
        gated_forward, scale_rows,
    },
};

use super::{
    Build, CudaLinear, CudaNorm, FullAttention, Input,
    feed_forward::{FeedForward, HiddenLayer},
    norm::Rows,
    stack::{Around, CudaStack},
};
use crate::{
    Error, Result,
    engine::cuda::functions::{element_function, gate},
    model::{
        config::NormPlace,
        inference::{layer::Role, parts::Parts, rotation::Rotations},
    },
};

/// Tokens that go through attention at once.
const MAX_AT_ONCE: usize = 512;

/// A block with its weights in the memory of a GPU.
#[derive(Debug)]
pub(in crate::model) struct CudaBlock {
    /// The block alone.
    stack: CudaStack,
    index: usize,
    /// The norms behind attention and behind the feed-forward block, where they normalize the residual stream.
    behind: Option<[CudaNorm; 2]>,
    /// The attention for the length of the text that was last computed.
    causal: RefCell<Option<Causal>>,
}

/// Causal attention over texts of one length.
#[derive(Debug)]
struct Causal {
    tokens: usize,
    attention: CachedAttention,
    keys: DeviceBuffer,
    values: DeviceBuffer,
    rotary: Option<[DeviceBuffer; 2]>,
    /// The number of tokens before each part that goes through at once.
    before: Vec<DeviceBuffer>,
}

fn no_experts() -> Error {
    Error::Unsupported { engine: "GPU calibration", what: "experts".into(), remedy: "calibrate on the CPU" }
}

impl CudaBlock {
    /// The block of that number.
    pub(in crate::model) fn new<P: Parts<f32>>(build: Build<'_, f32, P>, index: usize) -> Result<Self> {
        if build.config().experts.is_some() {
            return Err(no_experts());
        }
        let behind = match build.config().norm.place {
            NormPlace::After => {
                let norm = |part: &str| build.norm(&format!("blocks.{index}.{part}.norm"));
                Some([norm("attn")?, norm("mlp")?])
            }
            NormPlace::Before | NormPlace::Around | NormPlace::Parallel => None,
        };
        Ok(CudaBlock { stack: build.one_layer(index)?, index, behind, causal: RefCell::default() })
    }

    /// The hidden layer of the feed-forward block.
    fn hidden_layer(&self) -> Result<&HiddenLayer> {
        match &self.stack.layers[0].feed_forward {
            FeedForward::Dense(layer) => Ok(layer),
            FeedForward::Experts(_) => Err(no_experts()),
        }
    }

    fn zeros(&self, len: usize) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer::zeros(&self.stack.context, DataType::F32, len)?)
    }

    /// What a linear layer reads: from the residual stream `x`, or what the layer before it returned.
    pub(in crate::model) fn input(
        &self,
        role: Role,
        x: &mut DeviceBuffer,
        between: Option<DeviceBuffer>,
    ) -> Result<DeviceBuffer> {
        let layer = &self.stack.layers[0];
        let norm = match role {
            Role::Qkv => &layer.around_attention.norm,
            Role::Up => &layer.around_feed_forward.norm,
            Role::Latents | Role::Out | Role::Down => {
                return between.ok_or_else(|| Error::Setting {
                    what: "an input of a block",
                    found: "one that the layer before it returns".into(),
                    expected: "computed after that layer",
                });
            }
        };
        if self.behind.is_some() {
            return Ok(x.copied(0..x.len())?);
        }
        let mut h = self.zeros(x.len())?;
        let rows = Rows { tokens: x.len() / self.stack.config.width, every: 1, replaces: false };
        norm.launch(&self.stack.context, rows, (x.as_slice_mut(), None), Normalized::Floats(h.as_slice_mut()))?;
        Ok(h)
    }

    /// Computes a linear layer from its input `h`, with what follows it up to the next one. Returns what that one
    /// reads, unless it reads the residual stream `x`, to which the output is added; and the products of such a layer,
    /// without its bias, where they are asked for.
    pub(in crate::model) fn step(
        &self,
        role: Role,
        h: &DeviceBuffer,
        x: &mut DeviceBuffer,
        shows_products: bool,
    ) -> Result<(Option<DeviceBuffer>, Option<DeviceBuffer>)> {
        let (config, layer) = (&self.stack.config, &self.stack.layers[0]);
        let tokens = x.len() / config.width;
        match role {
            Role::Qkv => {
                let qkv = self.product(&layer.qkv, h, (tokens, config.qkv_width()))?;
                Ok((Some(self.attend(&qkv, tokens)?), None))
            }
            // Refused where the block was read.
            Role::Latents => Ok((None, None)),
            Role::Up => {
                let up = self.product(&self.hidden_layer()?.up, h, (tokens, config.up_width()))?;
                Ok((Some(self.hidden(&up, tokens)?), None))
            }
            Role::Out | Role::Down => {
                let (linear, around, place) = match role {
                    Role::Out => (&layer.out, &layer.around_attention, 0),
                    _ => (&self.hidden_layer()?.down, &layer.around_feed_forward, 1),
                };
                let y = self.product(linear, h, (tokens, config.width))?;
                let products = match shows_products {
                    false => None,
                    true if linear.has_bias() => {
                        let mut products = self.zeros(y.len())?;
                        linear.products(&self.stack.context, h.as_slice(), tokens, products.as_slice_mut())?;
                        Some(products)
                    }
                    true => Some(y.copied(0..y.len())?),
                };
                self.add(around, place, y, x)?;
                Ok((None, products))
            }
        }
    }

    fn product(
        &self,
        linear: &CudaLinear,
        h: &DeviceBuffer,
        (tokens, outputs): (usize, usize),
    ) -> Result<DeviceBuffer> {
        let mut y = self.zeros(tokens * outputs)?;
        linear.forward(&self.stack.context, Input::Floats(h.as_slice()), tokens, y.as_slice_mut())?;
        Ok(y)
    }

    /// The hidden layer with its function applied.
    fn hidden(&self, up: &DeviceBuffer, tokens: usize) -> Result<DeviceBuffer> {
        let (context, feed_forward) = (&self.stack.context, self.stack.config.feed_forward);
        let mut hidden = self.zeros(tokens * feed_forward.hidden)?;
        let (from, to) = (up.as_slice(), hidden.as_slice_mut());
        match feed_forward.gated {
            true => {
                gated_forward(context, gate(feed_forward.activation)?, (tokens, feed_forward.hidden), from, to)?;
            }
            false if self.hidden_layer()?.up_activates => return Ok(up.copied(0..up.len())?),
            false => activation_forward(context, element_function(feed_forward.activation), from, to)?,
        }
        Ok(hidden)
    }

    /// Adds a block's output to the residual stream.
    fn add(&self, around: &Around, place: usize, mut y: DeviceBuffer, x: &mut DeviceBuffer) -> Result<()> {
        let (context, width) = (&self.stack.context, self.stack.config.width);
        let tokens = x.len() / width;
        if let Some(norm) = &around.post_norm {
            let (mut sums, mut normalized) = (self.zeros(y.len())?, self.zeros(y.len())?);
            norm.apart(context, tokens, (sums.as_slice_mut(), y.as_slice()), normalized.as_slice_mut())?;
            y = normalized;
        }
        if let Some(factors) = &around.factors {
            scale_rows(context, (tokens, width), factors.as_slice(), y.as_slice_mut())?;
        }
        match &self.behind {
            None => add_in_place(context, y.as_slice(), x.as_slice_mut())?,
            Some(norms) => {
                let mut h = self.zeros(x.len())?;
                let rows = Rows { tokens, every: 1, replaces: true };
                let to = Normalized::Floats(h.as_slice_mut());
                norms[place].launch(context, rows, (x.as_slice_mut(), Some(y.as_slice())), to)?;
            }
        }
        Ok(())
    }

    /// Attention before the output projection.
    fn attend(&self, qkv: &DeviceBuffer, tokens: usize) -> Result<DeviceBuffer> {
        let config = &self.stack.config;
        let mut o = self.zeros(tokens * config.query_width())?;
        if !config.attention.is_causal {
            FullAttention::new(&self.stack, &[tokens])?.launch((&self.stack, 0), &[tokens], qkv, &mut o)?;
            return Ok(o);
        }
        let mut causal = self.causal.borrow_mut();
        let causal = match causal.take().filter(|causal| causal.tokens == tokens) {
            Some(there) => causal.insert(there),
            None => causal.insert(self.causal_of(tokens)?),
        };
        let layer = &self.stack.layers[0];
        let window = config.window(self.index);
        for (begin, before) in (0..tokens).step_by(MAX_AT_ONCE).zip(&causal.before) {
            let count = MAX_AT_ONCE.min(tokens - begin);
            let (inputs, outputs) = (config.qkv_width(), config.query_width());
            let mut o = o.as_slice_mut();
            let attended = CachedTokens {
                qkv: qkv.as_slice().part(begin * inputs..(begin + count) * inputs)?,
                positions: before.as_slice(),
                rotary: causal.rotary.as_ref().map(|[cos, sin]| Rotary { cos: cos.as_slice(), sin: sin.as_slice() }),
                norms: layer.head_norms.as_ref().map(|[query, key]| HeadNorms {
                    query: query.as_slice(),
                    key: key.as_slice(),
                    epsilon: config.norm.epsilon,
                }),
                scores: ScoreOptions { window, scale: config.attention.scale, soft_cap: config.attention.soft_cap },
                sinks: layer.sinks.as_ref().map(DeviceBuffer::as_slice),
                keys: causal.keys.as_slice_mut(),
                values: causal.values.as_slice_mut(),
                out: o.part(begin * outputs..(begin + count) * outputs)?,
            };
            causal.attention.run(count, attended)?;
        }
        Ok(o)
    }

    fn causal_of(&self, tokens: usize) -> Result<Causal> {
        let (config, context) = (&self.stack.config, &self.stack.context);
        let shape = CacheShape {
            batch: 1,
            heads: config.attention.heads,
            kv_heads: config.attention.kv_heads,
            head_dim: config.attention.head_dim,
            capacity: tokens,
        };
        let rotary = match Rotations::of(config) {
            None => None,
            Some(rotations) => {
                let tables = rotations.tables(0..tokens, tokens);
                let (mut cos, mut sin) = (vec![], vec![]);
                for position in 0..tokens {
                    let (c, s) = tables.of_layer(config, self.index).at(position);
                    cos.extend_from_slice(c);
                    sin.extend_from_slice(s);
                }
                Some([DeviceBuffer::from_host(context, &cos)?, DeviceBuffer::from_host(context, &sin)?])
            }
        };
        let attention = CachedAttention::new(context, DataType::F32, shape)?;
        let before = (0..tokens).step_by(MAX_AT_ONCE);
        let before = before.map(|begin| Ok(DeviceBuffer::from_ids(context, &[begin as u32])?));
        let before = before.collect::<Result<_>>()?;
        let (keys, values) = (self.zeros(shape.len()?)?, self.zeros(shape.len()?)?);
        Ok(Causal { tokens, attention, keys, values, rotary, before })
    }
}
