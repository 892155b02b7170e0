//! Causal attention over a cache of keys and values.

use twofour::kernel::{KernelElement, share};

use super::{
    cache::{BLOCK, Cache},
    few,
    layer::Place,
    norm::Norm,
    passes::{for_rows, narrowed},
};
use crate::{
    cpu::{
        matmul::{Into, View, multiply},
        rope, softmax, vector,
    },
    model::config::TransformerConfig,
};

/// Tokens from which attention is computed by GEMMs.
const MANY: usize = 16;

/// Queries of a GEMM, so that it can stop at the last key that any of them sees.
const QUERIES: usize = 64;

/// Multiplications that are worth a second thread.
const LEAST_SHARED: usize = 1 << 18;

/// Normalizes each head of the queries and of the keys of `qkv: [tokens, qkv_width]`.
pub(crate) fn normalize_heads(config: &TransformerConfig, [query, key]: &[Norm; 2], qkv: &mut [f32]) {
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
    config: &TransformerConfig,
    cache: &mut Cache<T>,
    place: Place<'_>,
    qkv: &mut [f32],
) -> Vec<T> {
    let (d, stride, queries, kv) =
        (config.attention.head_dim, config.qkv_width(), config.query_width(), config.kv_width());
    let tokens = qkv.len() / stride;
    if let Some(table) = place.rotary {
        for_rows(qkv, stride, |first, rows| {
            vector::widest(|| {
                for (token, row) in rows.chunks_exact_mut(stride).enumerate() {
                    let (cos, sin) = table.at(first + token);
                    row[..queries + kv].chunks_exact_mut(d).for_each(|head| rope::rotate(head, cos, sin));
                }
            });
        });
    }
    if tokens >= MANY {
        qkv.chunks_exact(stride).for_each(|row| push(config, cache, row));
        return many(config, cache, place, qkv);
    }
    let mut o = vec![0f32; tokens * queries];
    for (token, (row, o)) in qkv.chunks_exact(stride).zip(o.chunks_exact_mut(queries)).enumerate() {
        push(config, cache, row);
        let position = place.position + token;
        let first = config.window(place.layer).map_or(0, |window| (position + 1).saturating_sub(window));
        let cache = &*cache;
        // The query heads that share keys and values are neighbours.
        let group = queries / config.attention.kv_heads;
        let of_group = |scores: &mut Vec<f32>, (head, (q, o)): (usize, (&[f32], &mut [f32]))| {
            few::attend(cache.head(head), first, q, d, scores, o);
        };
        let groups = row[..queries].chunks_exact(group).zip(o.chunks_exact_mut(group)).enumerate();
        if (position + 1 - first) * queries < LEAST_SHARED {
            let mut scores = vec![];
            groups.for_each(|part| of_group(&mut scores, part));
        } else {
            share(groups, Vec::new, of_group);
        }
    }
    narrowed(&o)
}

/// Adds a token's keys and values to the cache.
fn push<T: KernelElement>(config: &TransformerConfig, cache: &mut Cache<T>, row: &[f32]) {
    let (queries, kv) = (config.query_width(), config.kv_width());
    cache.push(config.attention.head_dim, &row[queries..][..kv], &row[queries + kv..][..kv]);
}

/// Attention of many tokens, which are in the cache already.
fn many<T: KernelElement>(config: &TransformerConfig, cache: &Cache<T>, place: Place<'_>, qkv: &[f32]) -> Vec<T> {
    let (d, stride, queries) = (config.attention.head_dim, config.qkv_width(), config.query_width());
    let tokens = qkv.len() / stride;
    let window = config.window(place.layer);
    // The first position that the query sees, and the first whose keys are in the GEMMs.
    let begin = |query: usize| window.map_or(0, |window| (place.position + query + 1).saturating_sub(window));
    let first = begin(0) / BLOCK * BLOCK;
    // [head, token, dim]
    let mut o = vec![0f32; tokens * queries];
    let heads = o.chunks_exact_mut(tokens * d).enumerate();
    share(heads, <[Vec<f32>; 3]>::default, |[keys, values, p], (head, o)| {
        let of_head = cache.head(head * config.attention.kv_heads / config.attention.heads);
        let k_stride = of_head.positions().next_multiple_of(BLOCK) - first;
        vector::widest(|| {
            of_head.transposed_keys(first, keys);
            values.clear();
            values.extend(of_head.values[first * d..].iter().map(|value| value.to_f32()));
        });
        for (block, o) in o.chunks_mut(QUERIES * d).enumerate() {
            let (query, count) = (block * QUERIES, o.len() / d);
            let seen = place.position + query + count - first;
            let q = View::new(&qkv[query * stride + head * d..], count, d, stride);
            p.resize(count * seen, 0.0);
            let scale = 1.0 / (d as f32).sqrt();
            multiply(Into::Overwrite, p, seen, scale, q, View::new(keys, d, seen, k_stride));
            vector::widest(|| {
                for (row, p) in p.chunks_exact_mut(seen).enumerate() {
                    let begin = begin(query + row) - first;
                    p[..begin].fill(0.0);
                    let (of_query, unseen) = p[begin..].split_at_mut(place.position + query + row + 1 - first - begin);
                    softmax::in_place(of_query);
                    unseen.fill(0.0);
                }
            });
            multiply(Into::Overwrite, o, d, 1.0, View::new(p, count, seen, seen), View::new(values, seen, d, d));
        }
    });
    let mut out: Vec<T> = bytemuck::allocation::zeroed_vec(tokens * queries);
    for_rows(&mut out, queries, |first, rows| {
        for (token, row) in rows.chunks_exact_mut(queries).enumerate() {
            for (head, row) in row.chunks_exact_mut(d).enumerate() {
                let o = &o[(head * tokens + first + token) * d..][..d];
                row.iter_mut().zip(o).for_each(|(row, o)| *row = T::from_f32(*o));
            }
        }
    });
    out
}
