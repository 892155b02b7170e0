//! A sequence that is being read and written.

use std::fmt;

use rayon::prelude::*;
use twofour::kernel::{Activation, KernelElement};

use super::Inference;
use crate::{
    Error, Result,
    cpu::{
        matmul::{Into, View, multiply},
        rope, softmax, vector,
    },
    model::{GptConfig, VOCABULARY},
};

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

impl<'a, T: KernelElement> Session<'a, T> {
    pub(super) fn new(model: &'a Inference<T>) -> Self {
        let cache = || vec![0f32; model.config.context * model.config.width];
        let caches = model.layers.iter().map(|_| Cache { k: cache(), v: cache() }).collect();
        Session { model, caches, position: 0 }
    }

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
            let h = match model.has_squared_relu {
                false => layer.up.forward(&h, tokens, Activation::Gelu)?,
                true => squared(layer.up.forward(&h, tokens, Activation::Relu)?),
            };
            add(&mut x, &layer.down.forward(&h, tokens, Activation::Identity)?);
        }
        self.position += tokens;
        let last = model.norm.forward::<T>(&x[(tokens - 1) * width..]);
        let logits = widened(&model.head.forward(&last, 1, Activation::Identity)?);
        debug_assert_eq!(logits.len(), VOCABULARY);
        Ok(logits)
    }
}

fn squared<T: KernelElement>(mut values: Vec<T>) -> Vec<T> {
    values.iter_mut().for_each(|v| *v = T::from_f32(v.to_f32() * v.to_f32()));
    values
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
    let GptConfig { width, heads, context, .. } = model.config;
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
