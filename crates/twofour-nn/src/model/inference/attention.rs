//! Causal attention over a cache of keys and values.

use rayon::prelude::*;
use twofour::kernel::KernelElement;

use super::{layer::Place, norm::Norm};
use crate::{
    cpu::{
        matmul::{Into, View, multiply},
        rope, softmax, vector,
    },
    model::decoder::DecoderConfig,
};

/// Keys and values of one layer, `[position, kv_width]` each, of the tokens so far.
#[derive(Debug, Default, Clone)]
pub(crate) struct Cache {
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Normalizes each head of the queries and of the keys of `qkv: [tokens, qkv_width]`.
pub(crate) fn normalize_heads(config: &DecoderConfig, [query, key]: &[Norm; 2], qkv: &mut [f32]) {
    let (queries, keys) = (config.query_width(), config.kv_width());
    for row in qkv.chunks_exact_mut(config.qkv_width()) {
        let (q, kv) = row.split_at_mut(queries);
        q.copy_from_slice(&query.normalized(q));
        let k = &mut kv[..keys];
        k.copy_from_slice(&key.normalized(k));
    }
}

/// Causal attention of the new tokens `qkv: [tokens, qkv_width]` over everything in the cache and themselves; they are added to the cache. Queries and keys are
/// rotated first, where the model does. Returns `[tokens, query_width]`.
pub(crate) fn attend<T: KernelElement>(
    config: &DecoderConfig,
    cache: &mut Cache,
    place: Place<'_>,
    qkv: &mut [f32],
) -> Vec<T> {
    let (d, stride, queries, kv) = (config.head_dim, config.qkv_width(), config.query_width(), config.kv_width());
    let tokens = qkv.len() / stride;
    for (token, row) in qkv.chunks_exact_mut(stride).enumerate() {
        if let Some(table) = place.rotary {
            let (cos, sin) = table.at(token);
            row[..queries + kv].chunks_exact_mut(d).for_each(|head| rope::rotate(head, cos, sin));
        }
        cache.k.extend_from_slice(&row[queries..][..kv]);
        cache.v.extend_from_slice(&row[queries + kv..][..kv]);
    }
    let qkv = &*qkv;
    let end = place.position + tokens;
    let window = config.window(place.layer);
    // The first key that any of the new tokens sees.
    let first = window.map_or(0, |window| (place.position + 1).saturating_sub(window));
    let keys = end - first;
    let of_head = |head: usize, o: &mut [f32]| {
        let shared = head * config.kv_heads / config.heads;
        let part = |all: &'_ [f32]| first * kv + shared * d..all.len();
        let k = View::new(&cache.k[part(&cache.k)], keys, d, kv);
        let v = View::new(&cache.v[part(&cache.v)], keys, d, kv);
        let q = View::new(&qkv[head * d..], tokens, d, stride);
        let mut p = vec![0f32; tokens * keys];
        multiply(Into::Overwrite, &mut p, keys, 1.0 / (d as f32).sqrt(), q, k.t());
        vector::widest(|| {
            for (token, row) in p.chunks_exact_mut(keys).enumerate() {
                let position = place.position + token;
                let begin = window.map_or(0, |window| (position + 1).saturating_sub(window)) - first;
                row[..begin].fill(0.0);
                let (seen, unseen) = row[begin..].split_at_mut(position + 1 - first - begin);
                softmax::in_place(seen);
                unseen.fill(0.0);
            }
        });
        multiply(Into::Overwrite, o, d, 1.0, View::new(&p, tokens, keys, keys), v);
    };
    // [head, token, dim]
    let mut o = vec![0f32; tokens * queries];
    if tokens * keys * queries < 1 << 16 {
        o.chunks_exact_mut(tokens * d).enumerate().for_each(|(head, o)| of_head(head, o));
    } else {
        o.par_chunks_exact_mut(tokens * d).enumerate().for_each(|(head, o)| of_head(head, o));
    }
    (0..tokens * queries)
        .map(|at| {
            let (token, head, i) = (at / queries, at % queries / d, at % d);
            T::from_f32(o[(head * tokens + token) * d + i])
        })
        .collect()
}
