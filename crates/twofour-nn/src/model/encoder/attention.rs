//! Full attention of sequences of any lengths.

use rayon::prelude::*;
use twofour::kernel::KernelElement;

use crate::cpu::{
    matmul::{Into, View, multiply},
    softmax, vector,
};

/// Attention of each sequence over itself. `qkv` is `[tokens, 3 width]`, the sequences one after the other; returns `[tokens, width]`. `add_terms` sees a head's queries, of
/// which query `i` begins at element `3 width i`, and its scores `[tokens, tokens]` before the softmax, which it may change.
pub(in crate::model) fn attend<T: KernelElement>(
    [width, heads]: [usize; 2],
    qkv: &[f32],
    lengths: &[usize],
    add_terms: impl Fn(&[f32], &mut [f32]) + Sync,
) -> Vec<T> {
    let (d, stride) = (width / heads, 3 * width);
    let mut sequences = Vec::with_capacity(lengths.len());
    let mut rest = qkv;
    for &length in lengths {
        let (own, others) = rest.split_at(length * stride);
        sequences.push((own, length));
        rest = others;
    }
    let of_head = |qkv: &[f32], n: usize, head: usize| {
        let part = |at: usize| View::new(&qkv[at * width + head * d..], n, d, stride);
        let (mut p, mut o) = (vec![0f32; n * n], vec![0f32; n * d]);
        multiply(Into::Overwrite, &mut p, n, 1.0 / (d as f32).sqrt(), part(0), part(1).t());
        add_terms(&qkv[head * d..], &mut p);
        vector::widest(|| p.chunks_exact_mut(n).for_each(softmax::in_place));
        multiply(Into::Overwrite, &mut o, d, 1.0, View::new(&p, n, n, n), part(2));
        o
    };
    let outputs: Vec<Vec<f32>> = (0..sequences.len() * heads)
        .into_par_iter()
        .map(|index| {
            let (qkv, n) = sequences[index / heads];
            of_head(qkv, n, index % heads)
        })
        .collect();
    let mut merged = Vec::with_capacity(qkv.len() / 3);
    for (heads_of, length) in outputs.chunks(heads).zip(lengths) {
        for token in 0..*length {
            merged.extend(heads_of.iter().flat_map(|o| &o[token * d..][..d]).map(|value| T::from_f32(*value)));
        }
    }
    merged
}
