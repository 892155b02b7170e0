//! Attention of one token: for each group of query heads that share keys and values, over the cache where it lies.
//!
//! A block of keys has a register of neighbouring positions for each element, so scores accumulate in registers and are
//! never added up across one. Values are
//! added up in registers of neighbouring elements. All sums are f32.

use twofour::kernel::KernelElement;

use super::{
    cache::{BLOCK, HeadCache},
    scores::Scores,
};
use crate::cpu::vector::{self, Inlined};

/// Query heads that are computed side by side: their sums fit the registers beside a block of keys.
const SIDE_BY_SIDE: usize = 4;

/// Elements of values that are added up side by side.
const LANES: usize = 16;

/// The values, weighted by the scores of the query heads in `q: [heads, dim]`, over the cache's positions from `first`
/// on, into `o: [heads, dim]`; the query is at the last position, and the first head has a number. `scores` is working
/// memory.
pub(super) fn attend<T: KernelElement>(
    (cache, first): (&HeadCache<T>, usize),
    (scored, head): (Scores<'_>, usize),
    (q, dim): (&[f32], usize),
    scores: &mut Vec<f32>,
    o: &mut [f32],
) {
    let positions = cache.positions();
    let stride = positions.next_multiple_of(BLOCK);
    scores.resize(SIDE_BY_SIDE * stride, 0.0);
    let parts = q.chunks(SIDE_BY_SIDE * dim).zip(o.chunks_mut(SIDE_BY_SIDE * dim)).enumerate();
    for (part, (q, o)) in parts {
        let scored = (scored, head + part * SIDE_BY_SIDE);
        // By cases, so that the compiler knows the number of sums.
        match q.len() / dim {
            1 => vector::widest(Group::<T, 1> { cache, first, scored, q, dim, scores, o }),
            2 => vector::widest(Group::<T, 2> { cache, first, scored, q, dim, scores, o }),
            3 => vector::widest(Group::<T, 3> { cache, first, scored, q, dim, scores, o }),
            _ => vector::widest(Group::<T, SIDE_BY_SIDE> { cache, first, scored, q, dim, scores, o }),
        }
    }
}

/// Attention of `G` query heads.
struct Group<'a, T, const G: usize> {
    cache: &'a HeadCache<T>,
    first: usize,
    scored: (Scores<'a>, usize),
    q: &'a [f32],
    dim: usize,
    scores: &'a mut [f32],
    o: &'a mut [f32],
}

impl<T: KernelElement, const G: usize> Inlined for Group<'_, T, G> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Group { cache, first, scored, q, dim, scores, o } = self;
        group::<T, G>((cache, first), scored, (q, dim), scores, o);
    }
}

/// Loops over indices, which LLVM unrolls into registers.
#[inline(always)]
fn group<T: KernelElement, const G: usize>(
    (cache, first): (&HeadCache<T>, usize),
    (scored, head): (Scores<'_>, usize),
    (q, dim): (&[f32], usize),
    scores: &mut [f32],
    o: &mut [f32],
) {
    let positions = cache.positions();
    let stride = positions.next_multiple_of(BLOCK);
    for block in first / BLOCK..stride / BLOCK {
        let keys = &cache.keys[block * dim * BLOCK..][..dim * BLOCK];
        let mut sums = [[0f32; BLOCK]; G];
        for (i, key) in keys.as_chunks::<BLOCK>().0.iter().enumerate() {
            let mut wide = [0f32; BLOCK];
            for l in 0..BLOCK {
                wide[l] = key[l].to_f32();
            }
            for g in 0..G {
                let q = q[g * dim + i];
                for l in 0..BLOCK {
                    sums[g][l] += q * wide[l];
                }
            }
        }
        for g in 0..G {
            let out = &mut scores[g * stride + block * BLOCK..][..BLOCK];
            for l in 0..BLOCK {
                out[l] = scored.scale * sums[g][l];
            }
        }
    }
    for g in 0..G {
        let seen = &mut scores[g * stride..][first..positions];
        scored.weigh((head + g, positions - 1), first, seen);
    }
    let whole = dim - dim % LANES;
    for at in (0..whole).step_by(LANES) {
        weighted::<T, G, LANES>(cache, (first, at), dim, scores, o);
    }
    for at in whole..dim {
        weighted::<T, G, 1>(cache, (first, at), dim, scores, o);
    }
}

/// The sums of elements `at` to `at + L` of the values, weighted by the scores.
#[inline(always)]
fn weighted<T: KernelElement, const G: usize, const L: usize>(
    cache: &HeadCache<T>,
    (first, at): (usize, usize),
    dim: usize,
    scores: &[f32],
    o: &mut [f32],
) {
    let positions = cache.positions();
    let stride = positions.next_multiple_of(BLOCK);
    let mut sums = [[0f32; L]; G];
    let weights: [&[f32]; G] = std::array::from_fn(|g| &scores[g * stride..][first..positions]);
    for (position, value) in cache.values[first * dim..].chunks_exact(dim).enumerate() {
        let Some(value) = value[at..].first_chunk::<L>() else { return };
        let mut wide = [0f32; L];
        for l in 0..L {
            wide[l] = value[l].to_f32();
        }
        for g in 0..G {
            let weight = weights[g][position];
            for l in 0..L {
                sums[g][l] += weight * wide[l];
            }
        }
    }
    for g in 0..G {
        o[g * dim + at..][..L].copy_from_slice(&sums[g]);
    }
}
