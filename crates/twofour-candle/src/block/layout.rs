//! From the projection's layout to separate heads and back.
//!
//! A projection of width `w = heads * dim` gives queries, keys and values of a token one after the other: `[tokens, 3w]`.
//! Attention works on `[batch, head, position, dim]`, where one head of one batch element is contiguous.

use rayon::prelude::*;

use super::causal::Heads;
use crate::ops::rope::{self, Table};

/// The sizes that the two layouts share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) positions: usize,
    pub(crate) dim: usize,
}

impl Shape {
    /// `heads * dim`.
    pub(crate) fn width(self) -> usize {
        self.heads * self.dim
    }

    pub(crate) fn tokens(self) -> usize {
        self.batch * self.positions
    }

    /// Elements of the queries (or keys, or values, or outputs) of the whole batch.
    pub(crate) fn elements(self) -> usize {
        self.tokens() * self.width()
    }

    pub(crate) fn as_heads(self) -> Heads {
        Heads { sequences: self.batch * self.heads, positions: self.positions, dim: self.dim }
    }
}

/// Splits the projection `qkv: [tokens, 3w]` into heads and rotates queries and keys by their positions.
pub(crate) fn split(shape: Shape, table: &Table, qkv: &[f32], q: &mut [f32], k: &mut [f32], v: &mut [f32]) {
    let (w, d) = (shape.width(), shape.dim);
    let n = shape.positions * d;
    if n == 0 {
        return;
    }
    let heads = q.par_chunks_exact_mut(n).zip(k.par_chunks_exact_mut(n)).zip(v.par_chunks_exact_mut(n));
    heads.enumerate().for_each(|(sequence, ((q, k), v))| {
        let (batch, head) = (sequence / shape.heads, sequence % shape.heads);
        let tokens = qkv[batch * shape.positions * 3 * w..].chunks_exact(3 * w);
        let rows = q.chunks_exact_mut(d).zip(k.chunks_exact_mut(d)).zip(v.chunks_exact_mut(d));
        for (position, (token, ((q, k), v))) in tokens.zip(rows).enumerate() {
            let (cos, sin) = table.at(position);
            q.copy_from_slice(&token[head * d..][..d]);
            k.copy_from_slice(&token[w + head * d..][..d]);
            v.copy_from_slice(&token[2 * w + head * d..][..d]);
            rope::rotate(q, cos, sin);
            rope::rotate(k, cos, sin);
        }
    });
}

/// The gradient of [`split`]: gathers `dq`, `dk`, `dv` into `dqkv: [tokens, 3w]`.
pub(crate) fn split_backward(shape: Shape, table: &Table, dq: &[f32], dk: &[f32], dv: &[f32], dqkv: &mut [f32]) {
    let (w, d) = (shape.width(), shape.dim);
    if w == 0 {
        return;
    }
    dqkv.par_chunks_exact_mut(3 * w).with_min_len(8).enumerate().for_each(|(token, row)| {
        let (batch, position) = (token / shape.positions, token % shape.positions);
        let (cos, sin) = table.at(position);
        for head in 0..shape.heads {
            let at = ((batch * shape.heads + head) * shape.positions + position) * d;
            for (part, from) in [(0, dq), (w, dk), (2 * w, dv)] {
                row[part + head * d..][..d].copy_from_slice(&from[at..][..d]);
            }
            rope::rotate_back(&mut row[head * d..][..d], cos, sin);
            rope::rotate_back(&mut row[w + head * d..][..d], cos, sin);
        }
    });
}

/// Gathers the heads' outputs `[batch, head, position, dim]` into `[tokens, w]`.
pub(crate) fn merge(shape: Shape, o: &[f32], merged: &mut [f32]) {
    let (w, d) = (shape.width(), shape.dim);
    if w == 0 {
        return;
    }
    merged.par_chunks_exact_mut(w).with_min_len(16).enumerate().for_each(|(token, row)| {
        let (batch, position) = (token / shape.positions, token % shape.positions);
        for (head, row) in row.chunks_exact_mut(d).enumerate() {
            let at = ((batch * shape.heads + head) * shape.positions + position) * d;
            row.copy_from_slice(&o[at..at + d]);
        }
    });
}

/// The gradient of [`merge`], which is its inverse.
pub(crate) fn merge_backward(shape: Shape, dmerged: &[f32], d_o: &mut [f32]) {
    let (w, d) = (shape.width(), shape.dim);
    let n = shape.positions * d;
    if n == 0 {
        return;
    }
    d_o.par_chunks_exact_mut(n).enumerate().for_each(|(sequence, d_o)| {
        let (batch, head) = (sequence / shape.heads, sequence % shape.heads);
        let tokens = dmerged[batch * shape.positions * w..].chunks_exact(w);
        for (token, row) in tokens.zip(d_o.chunks_exact_mut(d)) {
            row.copy_from_slice(&token[head * d..][..d]);
        }
    });
}
