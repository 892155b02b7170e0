//! Causal softmax attention of separate heads, forward and backward, over plain slices.

use rayon::prelude::*;

use super::{
    matmul::{Into, View, multiply},
    workspace::Workspace,
};
use crate::ops::{softmax, vector};

/// Queries are taken this many at a time, so that the products can stop at the last key that any of them may see.
const BLOCK: usize = 64;

/// The shape of a batch of heads: every operand is `[sequences, positions, dim]`, where a sequence is one head of one batch
/// element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) sequences: usize,
    pub(crate) positions: usize,
    pub(crate) dim: usize,
}

impl Heads {
    /// Elements of one sequence's queries (or keys, or values).
    fn sequence(self) -> usize {
        self.positions * self.dim
    }

    /// Elements of all sequences' probabilities.
    pub(crate) fn probabilities(self) -> usize {
        self.sequences * self.positions * self.positions
    }

    fn scale(self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    /// First query, count, and number of keys visible to the last, for every block of queries.
    fn blocks(self) -> impl Iterator<Item = (usize, usize, usize)> {
        (0..self.positions).step_by(BLOCK).map(move |first| {
            let end = (first + BLOCK).min(self.positions);
            (first, end - first, end)
        })
    }
}

/// `o = softmax(q kᵀ / sqrt(dim), causal) v` for each sequence.
///
/// The probabilities go to `p: [sequences, positions, positions]`; of row `i`, elements up to the end of its block of
/// queries are written (zeros after `i`), the rest is left alone.
pub(crate) fn forward(shape: Heads, q: &[f32], k: &[f32], v: &[f32], p: &mut [f32], o: &mut [f32]) {
    let (t, d) = (shape.positions, shape.dim);
    if shape.sequence() == 0 {
        return;
    }
    let n = shape.sequence();
    let inputs = q.par_chunks_exact(n).zip(k.par_chunks_exact(n)).zip(v.par_chunks_exact(n));
    let outputs = p.par_chunks_exact_mut(t * t).zip(o.par_chunks_exact_mut(n));
    inputs.zip(outputs).with_max_len(1).for_each(|(((q, k), v), (p, o))| {
        for (first, count, keys) in shape.blocks() {
            let q = View::new(&q[first * d..], count, d, d);
            let p = &mut p[first * t..];
            multiply(Into::Overwrite, p, t, shape.scale(), q, View::new(k, keys, d, d).t());
            vector::widest(|| {
                for (row, p) in p.chunks_exact_mut(t).take(count).enumerate() {
                    let (seen, unseen) = p[..keys].split_at_mut(first + row + 1);
                    softmax::in_place(seen);
                    unseen.fill(0.0);
                }
            });
            let p = View::new(p, count, keys, t);
            multiply(Into::Overwrite, &mut o[first * d..], d, 1.0, p, View::new(v, keys, d, d));
        }
    });
}

/// What [`backward`] reads: the operands of the forward pass, its probabilities and the upstream gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Saved<'a> {
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) p: &'a [f32],
    pub(crate) d_o: &'a [f32],
}

/// Overwrites `dq`, `dk`, `dv` with the gradients for queries, keys and values.
pub(crate) fn backward(
    shape: Heads,
    saved: Saved<'_>,
    workspace: &Workspace,
    dq: &mut [f32],
    dk: &mut [f32],
    dv: &mut [f32],
) {
    let (t, d) = (shape.positions, shape.dim);
    if shape.sequence() == 0 {
        return;
    }
    let n = shape.sequence();
    let outputs = dq.par_chunks_exact_mut(n).zip(dk.par_chunks_exact_mut(n)).zip(dv.par_chunks_exact_mut(n));
    outputs.enumerate().with_max_len(1).for_each(|(sequence, ((dq, dk), dv))| {
        let of = |operand| part(operand, sequence, n);
        let (q, k, v, d_o) = (of(saved.q), of(saved.k), of(saved.v), of(saved.d_o));
        let p = part(saved.p, sequence, t * t);
        let mut ds = workspace.take(BLOCK * t);
        dk.fill(0.0);
        dv.fill(0.0);
        for (first, count, keys) in shape.blocks() {
            let p_rows = &p[first * t..];
            let p_block = View::new(p_rows, count, keys, t);
            let q = View::new(&q[first * d..], count, d, d);
            let d_o = View::new(&d_o[first * d..], count, d, d);
            multiply(Into::Add, dv, d, 1.0, p_block.t(), d_o);
            multiply(Into::Overwrite, &mut ds, t, 1.0, d_o, View::new(v, keys, d, d).t());
            vector::widest(|| {
                for (row, (p, ds)) in p_rows.chunks_exact(t).zip(ds.chunks_exact_mut(t)).take(count).enumerate() {
                    let (seen, unseen) = ds[..keys].split_at_mut(first + row + 1);
                    softmax::backward_in_place(&p[..first + row + 1], seen);
                    unseen.fill(0.0);
                }
            });
            let ds = View::new(&ds, count, keys, t);
            multiply(Into::Overwrite, &mut dq[first * d..], d, shape.scale(), ds, View::new(k, keys, d, d));
            multiply(Into::Add, dk, d, shape.scale(), ds.t(), q);
        }
    });
}

/// The slice of one sequence.
fn part(all: &[f32], sequence: usize, len: usize) -> &[f32] {
    &all[sequence * len..(sequence + 1) * len]
}
