//! Softmax attention of separate heads, causal or full, forward and backward, over plain slices.

use rayon::prelude::*;

use super::{
    matmul::{Into, View, multiply},
    softmax, vector,
};

/// Queries are taken this many at a time, so that the products can stop at the last key that any of them may see.
const BLOCK: usize = 64;

/// The shape of a batch of heads: every operand is `[sequences, positions, dim]`, where a sequence is one head of one batch
/// element.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// Heads of all batch elements.
    pub sequences: usize,
    /// Positions of a sequence.
    pub positions: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Whether a position attends to itself and earlier positions only.
    pub causal: bool,
}

impl Heads {
    /// Elements of one sequence's queries (or keys, or values).
    fn sequence(self) -> usize {
        self.positions * self.dim
    }

    /// Elements of all sequences' probabilities.
    pub fn probabilities(self) -> usize {
        self.sequences * self.positions * self.positions
    }

    fn scale(self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }

    /// First query, count, and number of keys visible to the last, for every block of queries.
    fn blocks(self) -> impl Iterator<Item = (usize, usize, usize)> {
        (0..self.positions).step_by(BLOCK).map(move |first| {
            let end = (first + BLOCK).min(self.positions);
            (first, end - first, if self.causal { end } else { self.positions })
        })
    }

    /// How many keys a query sees.
    fn seen(self, query: usize) -> usize {
        if self.causal { query + 1 } else { self.positions }
    }
}

/// `o = softmax(q kᵀ / sqrt(dim)) v` for each sequence.
///
/// The probabilities go to `p: [sequences, positions, positions]`; of row `i`, elements up to the end of its block of
/// queries are written (zeros after `i`), the rest is left alone.
pub fn forward(shape: Heads, q: &[f32], k: &[f32], v: &[f32], p: &mut [f32], o: &mut [f32]) {
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
                    let (seen, unseen) = p[..keys].split_at_mut(shape.seen(first + row));
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
pub fn backward(shape: Heads, saved: Saved<'_>, dq: &mut [f32], dk: &mut [f32], dv: &mut [f32]) {
    let (t, d) = (shape.positions, shape.dim);
    if shape.sequence() == 0 {
        return;
    }
    let n = shape.sequence();
    let outputs = dq.par_chunks_exact_mut(n).zip(dk.par_chunks_exact_mut(n)).zip(dv.par_chunks_exact_mut(n));
    let scores = || vec![0f32; BLOCK * t];
    outputs.enumerate().with_max_len(1).for_each_init(scores, |ds, (sequence, ((dq, dk), dv))| {
        let of = |operand| part(operand, sequence, n);
        let (q, k, v, d_o) = (of(saved.q), of(saved.k), of(saved.v), of(saved.d_o));
        let p = part(saved.p, sequence, t * t);
        dk.fill(0.0);
        dv.fill(0.0);
        for (first, count, keys) in shape.blocks() {
            let p_rows = &p[first * t..];
            let p_block = View::new(p_rows, count, keys, t);
            let q = View::new(&q[first * d..], count, d, d);
            let d_o = View::new(&d_o[first * d..], count, d, d);
            multiply(Into::Add, dv, d, 1.0, p_block.t(), d_o);
            multiply(Into::Overwrite, ds, t, 1.0, d_o, View::new(v, keys, d, d).t());
            vector::widest(|| {
                for (row, (p, ds)) in p_rows.chunks_exact(t).zip(ds.chunks_exact_mut(t)).take(count).enumerate() {
                    let (seen, unseen) = ds[..keys].split_at_mut(shape.seen(first + row));
                    softmax::backward_in_place(&p[..seen.len()], seen);
                    unseen.fill(0.0);
                }
            });
            let ds = View::new(ds, count, keys, t);
            multiply(Into::Overwrite, &mut dq[first * d..], d, shape.scale(), ds, View::new(k, keys, d, d));
            multiply(Into::Add, dk, d, shape.scale(), ds.t(), q);
        }
    });
}

/// The slice of one sequence.
fn part(all: &[f32], sequence: usize, len: usize) -> &[f32] {
    &all[sequence * len..(sequence + 1) * len]
}
