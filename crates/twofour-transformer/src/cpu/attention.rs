//! Softmax attention of separate heads, causal or full, forward and backward, over plain slices.
//!
//! Every operand is `[batch · heads, positions, head_dim]`: keys and values are there for each head of queries.

use std::ops::Range;

use rayon::prelude::*;

use super::{
    matmul::{Into, View, multiply},
    softmax, vector,
};
use crate::AttentionShape;

/// Queries are taken this many at a time, so that the products need only the keys that any of them attends to.
const BLOCK: usize = 64;

/// Queries that are taken together, and the keys that any of them attends to.
struct Block {
    first: usize,
    count: usize,
    keys: Range<usize>,
}

fn blocks(shape: AttentionShape) -> impl Iterator<Item = Block> {
    (0..shape.positions).step_by(BLOCK).map(move |first| {
        let end = (first + BLOCK).min(shape.positions);
        Block { first, count: end - first, keys: shape.keys_of(first).start..shape.keys_of(end - 1).end }
    })
}

impl Block {
    /// Returns the columns of a row of this block that the query attends to, counted from the block's first key.
    fn seen(&self, shape: AttentionShape, row: usize) -> Range<usize> {
        let keys = shape.keys_of(self.first + row);
        keys.start - self.keys.start..keys.end - self.keys.start
    }
}

/// Returns the number of probabilities of all heads.
pub fn probabilities(shape: AttentionShape) -> usize {
    shape.batch * shape.heads * shape.positions * shape.positions
}

/// `tanh(x)`.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + vector::exp(2.0 * x))
}

/// Zeros in a row outside a range.
#[inline(always)]
fn clear_outside(row: &mut [f32], range: Range<usize>) {
    row[..range.start].fill(0.0);
    row[range.end..].fill(0.0);
}

/// `o = softmax(cap(scale · q kᵀ)) v` for each head.
///
/// The probabilities go to `p: [batch · heads, positions, positions]`. Of a row, elements between the first and the
/// last key of its block of queries are written, with zeros where the query does not attend; the rest is left alone.
pub fn forward(shape: AttentionShape, q: &[f32], k: &[f32], v: &[f32], p: &mut [f32], o: &mut [f32]) {
    let (t, d) = (shape.positions, shape.head_dim);
    let n = t * d;
    if n == 0 {
        return;
    }
    let inputs = q.par_chunks_exact(n).zip(k.par_chunks_exact(n)).zip(v.par_chunks_exact(n));
    let outputs = p.par_chunks_exact_mut(t * t).zip(o.par_chunks_exact_mut(n));
    inputs.zip(outputs).with_max_len(1).for_each(|(((q, k), v), (p, o))| {
        for block in blocks(shape) {
            let Block { first, count, keys } = &block;
            let q = View::new(&q[first * d..], *count, d, d);
            let p = &mut p[first * t + keys.start..];
            let at = keys.start * d;
            multiply(Into::Overwrite, p, t, shape.scale(), q, View::new(&k[at..], keys.len(), d, d).t());
            vector::widest(|| {
                for (row, p) in p.chunks_mut(t).take(*count).enumerate() {
                    let p = &mut p[..keys.len()];
                    let seen = block.seen(shape, row);
                    let scores = &mut p[seen.clone()];
                    if let Some(cap) = shape.scores.soft_cap {
                        scores.iter_mut().for_each(|s| *s = cap * tanh(*s / cap));
                    }
                    softmax::in_place(scores);
                    clear_outside(p, seen);
                }
            });
            let p = View::new(p, *count, keys.len(), t);
            multiply(Into::Overwrite, &mut o[first * d..], d, 1.0, p, View::new(&v[at..], keys.len(), d, d));
        }
    });
}

/// What [`backward`] reads: the operands of the forward pass, its probabilities and the upstream gradient.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Queries.
    pub q: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Probabilities.
    pub p: &'a [f32],
    /// The gradient of the heads' outputs.
    pub d_o: &'a [f32],
}

/// Overwrites `dq`, `dk`, `dv` with the gradients for queries, keys and values.
pub fn backward(shape: AttentionShape, saved: Saved<'_>, dq: &mut [f32], dk: &mut [f32], dv: &mut [f32]) {
    let (t, d) = (shape.positions, shape.head_dim);
    let n = t * d;
    if n == 0 {
        return;
    }
    let outputs = dq.par_chunks_exact_mut(n).zip(dk.par_chunks_exact_mut(n)).zip(dv.par_chunks_exact_mut(n));
    // Gradients of scores, and, where they are capped, the scores again.
    let buffers = || [vec![0f32; BLOCK * t], vec![0f32; if shape.scores.soft_cap.is_some() { BLOCK * t } else { 0 }]];
    outputs.enumerate().with_max_len(1).for_each_init(buffers, |[ds, scores], (sequence, ((dq, dk), dv))| {
        let of = |operand| part(operand, sequence, n);
        let (q, k, v, d_o) = (of(saved.q), of(saved.k), of(saved.v), of(saved.d_o));
        let p = part(saved.p, sequence, t * t);
        dk.fill(0.0);
        dv.fill(0.0);
        for block in blocks(shape) {
            let Block { first, count, keys } = &block;
            let (from, len) = (keys.start * d, keys.len());
            let p_rows = &p[first * t + keys.start..];
            let p_block = View::new(p_rows, *count, len, t);
            let q = View::new(&q[first * d..], *count, d, d);
            let k = View::new(&k[from..], len, d, d);
            let d_o = View::new(&d_o[first * d..], *count, d, d);
            multiply(Into::Add, &mut dv[from..], d, 1.0, p_block.t(), d_o);
            multiply(Into::Overwrite, ds, t, 1.0, d_o, View::new(&v[from..], len, d, d).t());
            if let Some(cap) = shape.scores.soft_cap {
                multiply(Into::Overwrite, scores, t, shape.scale() / cap, q, k.t());
            }
            vector::widest(|| {
                for (row, (p, ds)) in p_rows.chunks(t).zip(ds.chunks_exact_mut(t)).take(*count).enumerate() {
                    let ds = &mut ds[..len];
                    let seen = block.seen(shape, row);
                    softmax::backward_in_place(&p[seen.clone()], &mut ds[seen.clone()]);
                    if shape.scores.soft_cap.is_some() {
                        let scores = &scores[row * t..][seen.clone()];
                        ds[seen.clone()].iter_mut().zip(scores).for_each(|(ds, s)| {
                            let t = tanh(*s);
                            *ds *= 1.0 - t * t;
                        });
                    }
                    clear_outside(ds, seen);
                }
            });
            let ds = View::new(ds, *count, len, t);
            multiply(Into::Overwrite, &mut dq[first * d..], d, shape.scale(), ds, k);
            multiply(Into::Add, &mut dk[from..], d, shape.scale(), ds.t(), q);
        }
    });
}

/// The slice of one sequence.
fn part(all: &[f32], sequence: usize, len: usize) -> &[f32] {
    &all[sequence * len..(sequence + 1) * len]
}
