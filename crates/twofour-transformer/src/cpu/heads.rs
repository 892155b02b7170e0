//! From the projection's layout to separate heads and back.
//!
//! A projection gives queries of all heads, keys of all key-value heads, and values of these: `[tokens, (heads + 2
//! kv_heads) head_dim]`. Attention works on `[batch, head, position, head_dim]`, where one head of one batch element is
//! contiguous; a key-value head is repeated for each head that shares it.

use rayon::prelude::*;

use super::rope::{self, Table};
use crate::AttentionShape;

/// The key-value head of a head.
fn shared(shape: AttentionShape, head: usize) -> usize {
    head * shape.kv_heads / shape.heads
}

/// Splits the projection into heads, and rotates queries and keys by their positions if there is a table.
pub fn split(shape: AttentionShape, table: Option<&Table>, qkv: &[f32], q: &mut [f32], k: &mut [f32], v: &mut [f32]) {
    let (d, width, stride) = (shape.head_dim, shape.width(), shape.qkv_width());
    let n = shape.positions * d;
    if n == 0 {
        return;
    }
    let heads = q.par_chunks_exact_mut(n).zip(k.par_chunks_exact_mut(n)).zip(v.par_chunks_exact_mut(n));
    heads.enumerate().for_each(|(sequence, ((q, k), v))| {
        let (batch, head) = (sequence / shape.heads, sequence % shape.heads);
        let key = width + shared(shape, head) * d;
        let tokens = qkv[batch * shape.positions * stride..].chunks_exact(stride);
        let rows = q.chunks_exact_mut(d).zip(k.chunks_exact_mut(d)).zip(v.chunks_exact_mut(d));
        for (position, (token, ((q, k), v))) in tokens.zip(rows).enumerate() {
            q.copy_from_slice(&token[head * d..][..d]);
            k.copy_from_slice(&token[key..][..d]);
            v.copy_from_slice(&token[key + shape.kv_heads * d..][..d]);
            if let Some(table) = table {
                let (cos, sin) = table.at(position);
                rope::rotate(q, cos, sin);
                rope::rotate(k, cos, sin);
            }
        }
    });
}

/// The gradient of [`split`]: gathers `dq`, `dk`, `dv` into `dqkv`; a key-value head's gradient is the sum over the
/// heads that share it.
pub fn split_backward(
    shape: AttentionShape,
    table: Option<&Table>,
    dq: &[f32],
    dk: &[f32],
    dv: &[f32],
    dqkv: &mut [f32],
) {
    let (d, width, stride) = (shape.head_dim, shape.width(), shape.qkv_width());
    if stride == 0 {
        return;
    }
    dqkv.par_chunks_exact_mut(stride).with_min_len(8).enumerate().for_each(|(token, row)| {
        let (batch, position) = (token / shape.positions, token % shape.positions);
        row[width..].fill(0.0);
        for head in 0..shape.heads {
            let at = ((batch * shape.heads + head) * shape.positions + position) * d;
            row[head * d..][..d].copy_from_slice(&dq[at..][..d]);
            let key = width + shared(shape, head) * d;
            for (part, from) in [(key, dk), (key + shape.kv_heads * d, dv)] {
                row[part..][..d].iter_mut().zip(&from[at..][..d]).for_each(|(sum, value)| *sum += value);
            }
        }
        if let Some(table) = table {
            let (cos, sin) = table.at(position);
            let rotated = &mut row[..width + shape.kv_heads * d];
            rotated.chunks_exact_mut(d).for_each(|head| rope::rotate_back(head, cos, sin));
        }
    });
}

/// Gathers the heads' outputs `[batch, head, position, head_dim]` into `[tokens, heads head_dim]`.
pub fn merge(shape: AttentionShape, o: &[f32], merged: &mut [f32]) {
    let (width, d) = (shape.width(), shape.head_dim);
    if width == 0 {
        return;
    }
    merged.par_chunks_exact_mut(width).with_min_len(16).enumerate().for_each(|(token, row)| {
        let (batch, position) = (token / shape.positions, token % shape.positions);
        for (head, row) in row.chunks_exact_mut(d).enumerate() {
            let at = ((batch * shape.heads + head) * shape.positions + position) * d;
            row.copy_from_slice(&o[at..at + d]);
        }
    });
}

/// The gradient of [`merge`], which is its inverse.
pub fn merge_backward(shape: AttentionShape, dmerged: &[f32], d_o: &mut [f32]) {
    let (width, d) = (shape.width(), shape.head_dim);
    let n = shape.positions * d;
    if n == 0 {
        return;
    }
    d_o.par_chunks_exact_mut(n).enumerate().for_each(|(sequence, d_o)| {
        let (batch, head) = (sequence / shape.heads, sequence % shape.heads);
        let tokens = dmerged[batch * shape.positions * width..].chunks_exact(width);
        for (token, row) in tokens.zip(d_o.chunks_exact_mut(d)) {
            row.copy_from_slice(&token[head * d..][..d]);
        }
    });
}
