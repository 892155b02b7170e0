//! Attention: causal over a cache of keys and values, and full over sequences of any lengths.

use rayon::prelude::*;
use twofour::kernel::{KernelElement, share};

use super::{
    cache::{BLOCK, Cache},
    few,
    passes::{for_rows, narrowed},
    rotation::Tables,
    scores::{Added, Scores},
};
use crate::{
    cpu::{
        matmul::{Into, View, multiply},
        rope, vector,
    },
    model::config::TransformerConfig,
};

/// Tokens from which attention is computed by GEMMs.
const MANY: usize = 16;

/// Queries of a GEMM, so that it can stop at the last key that any of them sees.
const QUERIES: usize = 64;

/// Multiplications that are worth a second thread.
const MIN_SHARED: usize = 1 << 18;

/// What tokens attend to.
#[derive(Debug)]
pub(crate) enum Seen<'a, T> {
    /// Each token to the tokens before it in its sequence, and to itself.
    Cache {
        /// Keys and values of the tokens before.
        cache: &'a mut Cache<T>,
        /// How many there are.
        position: usize,
        /// Cosines and sines of the new tokens' positions, where queries and keys are rotated.
        rotary: Option<&'a Tables>,
    },
    /// One token of each of several sequences, all at one position.
    Caches {
        /// Keys and values of the tokens before, of each sequence.
        caches: &'a mut [Cache<T>],
        /// How many there are.
        position: usize,
        /// Cosines and sines of the position, where queries and keys are rotated.
        rotary: Option<&'a Tables>,
    },
    /// Each token to its whole sequence: sequences of these lengths, one after the other.
    Sequences(&'a [usize]),
}

impl<T> Seen<'_, T> {
    /// Reborrows what tokens attend to.
    pub(crate) fn again(&mut self) -> Seen<'_, T> {
        match self {
            Seen::Cache { cache, position, rotary } => Seen::Cache { cache, position: *position, rotary: *rotary },
            Seen::Caches { caches, position, rotary } => Seen::Caches { caches, position: *position, rotary: *rotary },
            Seen::Sequences(lengths) => Seen::Sequences(lengths),
        }
    }
}

/// Attention of tokens `qkv: [tokens, qkv_width]` of a layer, before the output projection: `[tokens, query_width]`.
/// Keys and values are added to the cache, where there is
/// one; queries and keys are rotated first, where the model does.
pub(crate) fn attend<T: KernelElement>(
    (config, layer): (&TransformerConfig, usize),
    added: Added<'_>,
    seen: Seen<'_, T>,
    qkv: &mut [f32],
) -> Vec<T> {
    match seen {
        Seen::Sequences(lengths) => full(config, added, qkv, lengths),
        Seen::Cache { cache, position, rotary } => {
            if let Some(tables) = rotary {
                rotate(config, tables.of_layer(config, layer), qkv);
            }
            causal((config, added), cache, Place { position, window: config.window(layer) }, qkv)
        }
        Seen::Caches { caches, position, rotary } => {
            let (place, width) = (Place { position, window: config.window(layer) }, config.query_width());
            let mut o: Vec<T> = bytemuck::allocation::zeroed_vec(caches.len() * width);
            let rows = qkv.chunks_mut(config.qkv_width()).zip(o.chunks_mut(width)).zip(caches);
            share(
                rows,
                || (),
                |(), ((row, o), cache)| {
                    if let Some(tables) = rotary {
                        rotate(config, tables.of_layer(config, layer), row);
                    }
                    o.copy_from_slice(&causal((config, added), cache, place, row));
                },
            );
            o
        }
    }
}

/// Where new tokens are in their sequence, and how many tokens back, themselves included, they attend to.
#[derive(Debug, Clone, Copy)]
struct Place {
    position: usize,
    window: Option<usize>,
}

impl Place {
    /// The first position that a new token sees.
    fn begin(self, token: usize) -> usize {
        self.window.map_or(0, |window| (self.position + token + 1).saturating_sub(window))
    }
}

fn rotate(config: &TransformerConfig, table: &rope::Table, qkv: &mut [f32]) {
    let (d, stride, heads) = (config.attention.head_dim, config.qkv_width(), config.query_width() + config.kv_width());
    let rotated = config.rotated();
    for_rows(qkv, stride, |first, rows| {
        vector::widest(|| {
            for (token, row) in rows.chunks_exact_mut(stride).enumerate() {
                let (cos, sin) = table.at(first + token);
                row[..heads].chunks_exact_mut(d).for_each(|head| rope::rotate(&mut head[..rotated], cos, sin));
            }
        });
    });
}

/// Attention of the new tokens over everything in the cache and themselves.
fn causal<T: KernelElement>(
    (config, added): (&TransformerConfig, Added<'_>),
    cache: &mut Cache<T>,
    place: Place,
    qkv: &[f32],
) -> Vec<T> {
    let (d, stride, queries) = (config.attention.head_dim, config.qkv_width(), config.query_width());
    let tokens = qkv.len() / stride;
    if tokens >= MANY {
        qkv.chunks_exact(stride).for_each(|row| push(config, cache, row));
        return many((config, added), cache, place, qkv);
    }
    let scored = Scores::of(config, added);
    let mut o = vec![0f32; tokens * queries];
    for (token, (row, o)) in qkv.chunks_exact(stride).zip(o.chunks_exact_mut(queries)).enumerate() {
        push(config, cache, row);
        let first = place.begin(token);
        let cache = &*cache;
        // The query heads that share keys and values are neighbours.
        let group = queries / config.attention.kv_heads;
        let of_group = |scores: &mut Vec<f32>, (head, (q, o)): (usize, (&[f32], &mut [f32]))| {
            few::attend((cache.head(head), first), (scored, head * group / d), (q, d), scores, o);
        };
        let groups = row[..queries].chunks_exact(group).zip(o.chunks_exact_mut(group)).enumerate();
        if (place.position + token + 1 - first) * queries < MIN_SHARED {
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
fn many<T: KernelElement>(
    (config, added): (&TransformerConfig, Added<'_>),
    cache: &Cache<T>,
    place: Place,
    qkv: &[f32],
) -> Vec<T> {
    let (d, stride, queries) = (config.attention.head_dim, config.qkv_width(), config.query_width());
    let tokens = qkv.len() / stride;
    let scored = Scores::of(config, added);
    // The first position whose keys are in the GEMMs.
    let first = place.begin(0) / BLOCK * BLOCK;
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
            multiply(Into::Overwrite, p, seen, scored.scale, q, View::new(keys, d, seen, k_stride));
            vector::widest(|| {
                for (row, p) in p.chunks_exact_mut(seen).enumerate() {
                    let begin = place.begin(query + row) - first;
                    p[..begin].fill(0.0);
                    let (of_query, unseen) = p[begin..].split_at_mut(place.position + query + row + 1 - first - begin);
                    scored.weigh((head, place.position + query + row), first + begin, of_query);
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

/// Attention of each sequence over itself, the sequences one after the other.
fn full<T: KernelElement>(config: &TransformerConfig, added: Added<'_>, qkv: &[f32], lengths: &[usize]) -> Vec<T> {
    let (d, stride, queries, kv) =
        (config.attention.head_dim, config.qkv_width(), config.query_width(), config.kv_width());
    let (heads, group) = (config.attention.heads, config.attention.heads / config.attention.kv_heads.max(1));
    let scored = Scores::of(config, added);
    let mut sequences = Vec::with_capacity(lengths.len());
    let mut rest = qkv;
    for &length in lengths {
        let (own, others) = rest.split_at(length * stride);
        sequences.push((own, length));
        rest = others;
    }
    let of_head = |qkv: &[f32], n: usize, head: usize| {
        let part = |begin: usize| View::new(&qkv[begin..], n, d, stride);
        let (key, value) = (queries + head / group * d, queries + kv + head / group * d);
        let (mut p, mut o) = (vec![0f32; n * n], vec![0f32; n * d]);
        multiply(Into::Overwrite, &mut p, n, scored.scale, part(head * d), part(key).t());
        if let Some(relative) = added.relative {
            relative.add(&qkv[head * d..], (d, stride), &mut p);
        }
        vector::widest(|| {
            p.chunks_exact_mut(n).enumerate().for_each(|(query, scores)| scored.weigh((head, query), 0, scores));
        });
        multiply(Into::Overwrite, &mut o, d, 1.0, View::new(&p, n, n, n), part(value));
        o
    };
    let of_head = |index: usize| of_head(sequences[index / heads].0, sequences[index / heads].1, index % heads);
    let outputs: Vec<Vec<f32>> = (0..sequences.len() * heads).into_par_iter().map(of_head).collect();
    let mut merged = Vec::with_capacity(qkv.len() / stride.max(1) * queries);
    for (heads_of, length) in outputs.chunks(heads).zip(lengths) {
        for token in 0..*length {
            merged.extend(heads_of.iter().flat_map(|o| &o[token * d..][..d]).map(|value| T::from_f32(*value)));
        }
    }
    merged
}
