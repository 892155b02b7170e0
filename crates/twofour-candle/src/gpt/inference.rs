//! Inference: weights packed for the kernels, and a key-value cache.

use std::{fmt, ops::ControlFlow};

use rayon::prelude::*;
use twofour::{
    Arithmetic, MatrixRef,
    kernel::{Activation, DenseWeight, Epilogue, KernelElement, SparseWeight},
};

use super::{Config, Gpt, Sampling, VOCABULARY, form};
use crate::{
    Error, Result,
    block::{
        LayerNorm,
        matmul::{Into, View, multiply},
    },
    linear::{AnyLinear, LinearOperand},
    ops::{layer_norm, rope, rope::Table, rows, softmax, vector},
};

/// A [`Gpt`]'s weights packed for the kernels in `T`: dense layers for the dense kernel, sparse and compressed ones for
/// the 2:4 kernel. A copy: training the model further does not change it.
///
/// Products run in `T`; the residual stream, the norms, attention and the cache are f32.
#[derive(Debug)]
pub struct Inference<T: KernelElement> {
    config: Config,
    embedding: Vec<f32>,
    layers: Vec<Layer<T>>,
    norm: Norm,
    head: Linear<T>,
    rotary: Table,
}

#[derive(Debug)]
struct Layer<T: KernelElement> {
    attention_norm: Norm,
    qkv: Linear<T>,
    out: Linear<T>,
    feed_forward_norm: Norm,
    up: Linear<T>,
    down: Linear<T>,
}

#[derive(Debug)]
struct Norm {
    gain: Vec<f32>,
    bias: Vec<f32>,
    eps: f32,
}

#[derive(Debug)]
struct Linear<T: KernelElement> {
    weight: Weight<T>,
    bias: Option<Vec<f32>>,
    outputs: usize,
}

#[derive(Debug)]
enum Weight<T: KernelElement> {
    Dense(DenseWeight<T>),
    Sparse(SparseWeight<T>),
    /// A layer that is compressed already, in whatever dtype; it brings its bias with it.
    Packed {
        layer: LinearOperand,
        bytes: usize,
    },
}

impl<T: KernelElement> Linear<T> {
    fn new(linear: &AnyLinear) -> Result<Self> {
        let values =
            |t| rows::with_slice(t, "parameter", |v| Ok(v.iter().map(|&v| T::from_f32(v)).collect::<Vec<T>>()));
        let weight = match linear {
            AnyLinear::Dense(linear) => {
                let (outputs, inputs) = linear.weight().dims2()?;
                Weight::Dense(DenseWeight::pack(MatrixRef::new(outputs, inputs, &values(linear.weight())?)?)?)
            }
            AnyLinear::Sparse(linear) => Weight::Sparse(SparseWeight::pack(form::compressed(linear)?)?),
            AnyLinear::Compressed(_) => {
                let layer = linear.operand()?;
                let outputs = layer.out_features();
                let weight = Weight::Packed { layer, bytes: linear.weight_bytes() };
                return Ok(Linear { weight, bias: None, outputs });
            }
        };
        let bias = match linear.bias() {
            Some(bias) => Some(rows::with_slice(bias, "bias", |b| Ok(b.to_vec()))?),
            None => None,
        };
        let outputs = linear.weight().map_or(Ok(0), |w| w.dim(0))?;
        Ok(Linear { weight, bias, outputs })
    }

    /// `act(x·Wᵀ + bias)`, `[tokens, outputs]`, for `x: [tokens, inputs]`.
    fn forward(&self, x: &[T], tokens: usize, activation: Activation) -> Result<Vec<T>> {
        let mut y = vec![T::ZERO; tokens * self.outputs];
        let epilogue = Epilogue { bias: self.bias.as_deref(), activation };
        match &self.weight {
            Weight::Dense(weight) => weight.linear(x, tokens, epilogue, &mut y)?,
            Weight::Sparse(weight) => weight.linear(x, tokens, epilogue, &mut y)?,
            Weight::Packed { layer, .. } => {
                let mut wide = vec![0f32; y.len()];
                layer.forward(&widened(x), tokens, activation, &mut wide)?;
                y.iter_mut().zip(wide).for_each(|(y, v)| *y = T::from_f32(v));
            }
        }
        Ok(y)
    }

    fn bytes(&self) -> usize {
        match &self.weight {
            Weight::Dense(weight) => weight.bytes(),
            Weight::Sparse(weight) => weight.bytes(),
            Weight::Packed { bytes, .. } => *bytes,
        }
    }
}

impl Norm {
    fn new(norm: &LayerNorm) -> Result<Self> {
        let values = |t| rows::with_slice(t, "norm", |v| Ok(v.to_vec()));
        Ok(Norm { gain: values(norm.gain())?, bias: values(norm.bias())?, eps: norm.eps() })
    }

    fn forward<T: Arithmetic>(&self, x: &[f32]) -> Vec<T> {
        let mut y = vec![0f32; x.len()];
        layer_norm::forward(x, &self.gain, &self.bias, self.eps, &mut y);
        y.into_iter().map(T::from_f32).collect()
    }
}

impl<T: KernelElement> Inference<T> {
    /// Packs the model's present weights.
    ///
    /// # Errors
    /// Those of reading and packing the weights.
    pub fn new(model: &Gpt) -> Result<Self> {
        let named = |name: &str, linear: &AnyLinear| Linear::new(linear).map_err(|e: Error| e.in_layer(name));
        let layers = model
            .layers
            .iter()
            .enumerate()
            .map(|(index, layer)| {
                let (attention, feed_forward) = (&layer.attention, &layer.feed_forward);
                Ok(Layer {
                    attention_norm: Norm::new(&attention.norm)?,
                    qkv: named(&format!("blocks.{index}.attn.qkv"), &attention.qkv)?,
                    out: named(&format!("blocks.{index}.attn.out"), &attention.out)?,
                    feed_forward_norm: Norm::new(&feed_forward.norm)?,
                    up: named(&format!("blocks.{index}.mlp.up"), &feed_forward.up)?,
                    down: named(&format!("blocks.{index}.mlp.down"), &feed_forward.down)?,
                })
            })
            .collect::<Result<_>>()?;
        let config = *model.config();
        Ok(Inference {
            config,
            embedding: rows::with_slice(&model.embedding, "embedding", |v| Ok(v.to_vec()))?,
            layers,
            norm: Norm::new(&model.norm)?,
            head: named("head", &model.head)?,
            rotary: Table::new(config.context, config.width / config.heads / 2),
        })
    }

    /// The model's sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Bytes of the linear layers' weights in memory: values, and metadata where they are 2:4; without biases.
    pub fn weight_bytes(&self) -> usize {
        let of_layer = |l: &Layer<T>| l.qkv.bytes() + l.out.bytes() + l.up.bytes() + l.down.bytes();
        self.layers.iter().map(of_layer).sum::<usize>() + self.head.bytes()
    }

    /// Begins a sequence.
    #[must_use]
    pub fn session(&self) -> Session<'_, T> {
        let cache = || vec![0f32; self.config.context * self.config.width];
        Session {
            model: self,
            caches: self.layers.iter().map(|_| Cache { k: cache(), v: cache() }).collect(),
            position: 0,
        }
    }

    /// Continues `prompt` by up to `count` bytes, calling `f` with each; `f` may stop it.
    ///
    /// Where the context is full, the session begins anew with the later half of what it held, so the text may be of any
    /// length. An empty prompt is taken for a line break.
    ///
    /// # Errors
    /// [`Error::Setting`] for a bad temperature; those of the products.
    pub fn generate(
        &self,
        prompt: &[u8],
        count: usize,
        sampling: Sampling,
        mut f: impl FnMut(u8) -> ControlFlow<()>,
    ) -> Result<()> {
        sampling.validate()?;
        let context = self.config.context;
        let mut text = if prompt.is_empty() { b"\n".to_vec() } else { prompt.to_vec() };
        let mut session = self.session();
        let mut unread = text.len().saturating_sub(context);
        for index in 0..count {
            if session.remaining() < text.len() - unread {
                session = self.session();
                unread = text.len() - (context / 2).max(1);
            }
            let mut logits = session.feed(&text[unread..])?;
            unread = text.len();
            let byte = sampling.choose(&mut logits, index as u64);
            text.push(byte);
            if f(byte).is_break() {
                break;
            }
        }
        Ok(())
    }
}

/// A sequence in progress: the keys and values of what was fed so far.
pub struct Session<'a, T: KernelElement> {
    model: &'a Inference<T>,
    caches: Vec<Cache>,
    position: usize,
}

/// Keys and values of one layer: `[head, context, dim]`.
struct Cache {
    k: Vec<f32>,
    v: Vec<f32>,
}

impl<T: KernelElement> fmt::Debug for Session<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("position", &self.position).field("remaining", &self.remaining()).finish()
    }
}

impl<T: KernelElement> Session<'_, T> {
    /// How many bytes were fed.
    pub fn position(&self) -> usize {
        self.position
    }

    /// How many more fit the context.
    pub fn remaining(&self) -> usize {
        self.model.config.context - self.position
    }

    /// Feeds one or more bytes and returns the scores of the byte that follows the last, `[256]`.
    ///
    /// # Errors
    /// [`Error::Setting`] for no bytes or more than [`Session::remaining`]; those of the products.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Vec<f32>> {
        if bytes.is_empty() || bytes.len() > self.remaining() {
            let found = format!("{} where {} fit", bytes.len(), self.remaining());
            return Err(Error::Setting { what: "number of bytes to feed", found, expected: "from 1 to what fits" });
        }
        let model = self.model;
        let (width, tokens) = (model.config.width, bytes.len());
        let mut x: Vec<f32> =
            bytes.iter().flat_map(|&byte| &model.embedding[usize::from(byte) * width..][..width]).copied().collect();
        for (layer, cache) in model.layers.iter().zip(&mut self.caches) {
            let h = layer.attention_norm.forward::<T>(&x);
            let mut qkv = widened(&layer.qkv.forward(&h, tokens, Activation::Identity)?);
            let o = attend(model, cache, self.position, &mut qkv);
            add(&mut x, &layer.out.forward(&o, tokens, Activation::Identity)?);
            let h = layer.feed_forward_norm.forward::<T>(&x);
            let h = layer.up.forward(&h, tokens, Activation::Gelu)?;
            add(&mut x, &layer.down.forward(&h, tokens, Activation::Identity)?);
        }
        self.position += tokens;
        let last = model.norm.forward::<T>(&x[(tokens - 1) * width..]);
        let logits = widened(&model.head.forward(&last, 1, Activation::Identity)?);
        debug_assert_eq!(logits.len(), VOCABULARY);
        Ok(logits)
    }
}

fn widened<T: KernelElement>(values: &[T]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}

fn add<T: KernelElement>(x: &mut [f32], y: &[T]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y.to_f32());
}

/// Causal attention of the new tokens `qkv: [tokens, 3 * width]`, at `position` and after, over everything in the cache and
/// themselves; they are added to the cache. Returns `[tokens, width]`.
fn attend<T: KernelElement>(model: &Inference<T>, cache: &mut Cache, position: usize, qkv: &mut [f32]) -> Vec<T> {
    let Config { width, heads, context, .. } = model.config;
    let d = width / heads;
    let tokens = qkv.len() / (3 * width);
    for (token, row) in qkv.chunks_exact_mut(3 * width).enumerate() {
        let (cos, sin) = model.rotary.at(position + token);
        row[..2 * width].chunks_exact_mut(d).for_each(|head| rope::rotate(head, cos, sin));
        for head in 0..heads {
            let at = (head * context + position + token) * d;
            cache.k[at..at + d].copy_from_slice(&row[width + head * d..][..d]);
            cache.v[at..at + d].copy_from_slice(&row[2 * width + head * d..][..d]);
        }
    }
    let qkv = &*qkv;
    let keys = position + tokens;
    let of_head = |head: usize, o: &mut [f32]| {
        let k = View::new(&cache.k[head * context * d..], keys, d, d);
        let v = View::new(&cache.v[head * context * d..], keys, d, d);
        let q = View::new(&qkv[head * d..], tokens, d, 3 * width);
        let mut p = vec![0f32; tokens * keys];
        multiply(Into::Overwrite, &mut p, keys, 1.0 / (d as f32).sqrt(), q, k.t());
        vector::widest(|| {
            for (token, row) in p.chunks_exact_mut(keys).enumerate() {
                let (seen, unseen) = row.split_at_mut(position + token + 1);
                softmax::in_place(seen);
                unseen.fill(0.0);
            }
        });
        multiply(Into::Overwrite, o, d, 1.0, View::new(&p, tokens, keys, keys), v);
    };
    // [head, token, dim]
    let mut o = vec![0f32; tokens * width];
    if tokens == 1 {
        o.chunks_exact_mut(d).enumerate().for_each(|(head, o)| of_head(head, o));
    } else {
        o.par_chunks_exact_mut(tokens * d).enumerate().for_each(|(head, o)| of_head(head, o));
    }
    (0..tokens * width)
        .map(|at| {
            let (token, head, i) = (at / width, at % width / d, at % d);
            T::from_f32(o[(head * tokens + token) * d + i])
        })
        .collect()
}

impl Gpt {
    /// Continues `prompt` by up to `count` bytes, computing in f32; see [`Inference::generate`]. To generate more than once,
    /// or in bf16, pack the weights once with [`Inference::new`].
    ///
    /// # Errors
    /// As [`Inference::new`] and [`Inference::generate`].
    pub fn generate(
        &self,
        prompt: &[u8],
        count: usize,
        sampling: Sampling,
        f: impl FnMut(u8) -> ControlFlow<()>,
    ) -> Result<()> {
        Inference::<f32>::new(self)?.generate(prompt, count, sampling, f)
    }
}
