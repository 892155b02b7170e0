//! Queries, keys and values made of latents, for inference. They are made whole, head by head, in the order that
//! attention has: what is rotated of a query or a key, then what is not; a value, then zeros up to as many elements.

use std::ops::Range;

use twofour::kernel::{Activation, KernelElement};

use super::{
    linear::Linear,
    norm::Norm,
    parts::Parts,
    passes::{for_rows, narrowed, widened},
};
use crate::{
    Result,
    model::config::{LatentConfig, NormKind, TransformerConfig},
};

/// The layers that read the latents of queries, where there are some, and of keys and values.
#[derive(Debug)]
pub(crate) struct Latents<T: KernelElement> {
    config: LatentConfig,
    readers: Vec<Reader<T>>,
}

/// A layer behind a norm of its input.
#[derive(Debug)]
struct Reader<T: KernelElement> {
    norm: Norm,
    layer: Linear<T>,
    /// Where its input lies in a row.
    place: Range<usize>,
}

impl<T: KernelElement> Latents<T> {
    /// Builds the latents of a block, whose parts' names `at` completes; none for a block without latents.
    pub(super) fn build(
        config: &TransformerConfig,
        parts: &impl Parts<T>,
        at: impl Fn(&str) -> String,
    ) -> Result<Option<Self>> {
        let Some(own) = &config.attention.latent else { return Ok(None) };
        let reader = |(name, outputs, place): (&str, usize, Range<usize>)| {
            let gain = |part: &str| parts.vector(&at(&format!("{name}.norm.{part}")), place.len());
            let norm = Norm::read(NormKind::RootMeanSquare, LatentConfig::EPSILON, gain)?;
            Ok(Reader { norm, layer: parts.linear(&at(name), (outputs, place.len()))?, place })
        };
        let readers = config.of_latents().into_iter().map(reader).collect::<Result<_>>()?;
        Ok(Some(Latents { config: own.clone(), readers }))
    }

    pub(super) fn bytes(&self) -> usize {
        self.readers.iter().map(|reader| reader.layer.bytes()).sum()
    }

    /// What the block's first layer made, `[tokens, attention_outputs]`, with its latents normalized.
    pub(super) fn normalized(&self, config: &TransformerConfig, mut first: Vec<f32>) -> Vec<T> {
        for row in first.chunks_exact_mut(config.attention_outputs()) {
            for Reader { norm, place, .. } in &self.readers {
                let own = &mut row[place.clone()];
                own.copy_from_slice(&norm.normalized(own));
            }
        }
        narrowed(&first)
    }

    /// What a layer reads of rows that [`Latents::normalized`] returned, and its features; the layer of keys and values
    /// is the last.
    pub(crate) fn input(&self, config: &TransformerConfig, reader: usize, rows: &[T]) -> Option<(Vec<T>, usize)> {
        let place = &self.readers.get(reader)?.place;
        let rows = rows.chunks_exact(config.attention_outputs());
        Some((rows.flat_map(|row| &row[place.clone()]).copied().collect(), place.len()))
    }

    /// Queries, keys and values, `[tokens, qkv_width]`, of rows that [`Latents::normalized`] returned.
    pub(super) fn expanded(&self, config: &TransformerConfig, rows: &[T]) -> Result<Vec<f32>> {
        let (stride, width) = (config.attention_outputs(), config.qkv_width());
        let (queries, d, rotated) = (config.query_width(), config.attention.head_dim, config.rotated());
        let tokens = rows.len() / stride;
        let mut products = vec![];
        for (reader, Reader { layer, .. }) in self.readers.iter().enumerate() {
            let input = self.input(config, reader, rows).unwrap_or_default().0;
            products.push(widened(&layer.forward(&input, tokens, Activation::Identity)?));
        }
        let pairs = products.pop().unwrap_or_default();
        // Queries without a latent lie in front of that of keys and values.
        let (of_queries, query_stride) = match products.pop() {
            Some(products) => (products, queries),
            None => (widened(rows), stride),
        };
        let (plain, value) = (d - rotated, self.config.value_dim);
        let pair_stride = config.attention.heads * (plain + value);
        let mut qkv: Vec<f32> = bytemuck::allocation::zeroed_vec(tokens * width);
        for_rows(&mut qkv, width, |first, qkv| {
            for (token, qkv) in (first..).zip(qkv.chunks_exact_mut(width)) {
                let shared = widened(&rows[token * stride..][stride - rotated..stride]);
                let (q, kv) = qkv.split_at_mut(queries);
                let (k, v) = kv.split_at_mut(queries);
                let of_queries = of_queries[token * query_stride..][..queries].chunks_exact(d);
                for (to, own) in q.chunks_exact_mut(d).zip(of_queries) {
                    self.rotated_first(&own[plain..], to);
                    to[rotated..].copy_from_slice(&own[..plain]);
                }
                let of_token = pairs[token * pair_stride..][..pair_stride].chunks_exact(plain + value);
                for ((k, v), own) in k.chunks_exact_mut(d).zip(v.chunks_exact_mut(d)).zip(of_token) {
                    self.rotated_first(&shared, k);
                    k[rotated..].copy_from_slice(&own[..plain]);
                    v[..value].copy_from_slice(&own[plain..]);
                }
            }
        });
        Ok(qkv)
    }

    /// Writes elements that are rotated to the beginning of a head, in two halves.
    fn rotated_first(&self, own: &[f32], head: &mut [f32]) {
        let half = own.len() / 2;
        let from = |i: usize| match self.config.is_interleaved {
            true => 2 * (i % half) + i / half,
            false => i,
        };
        head[..own.len()].iter_mut().enumerate().for_each(|(i, to)| *to = self.config.factor * own[from(i)]);
    }

    /// What attention gives to the output layer, `[tokens, value_width]`: the values without the zeros behind them.
    pub(super) fn values(&self, config: &TransformerConfig, o: &[T]) -> Vec<T> {
        let heads = o.chunks_exact(config.attention.head_dim);
        heads.flat_map(|head| &head[..self.config.value_dim]).copied().collect()
    }
}
