//! Unstructured selection: the lowest scores of a row, of a weight, or of several weights go, without a copy of the
//! scores.
//!
//! A threshold is found as a radix sort begins: scores become integers of the same order, a first pass counts their
//! upper halves, a second the lower halves of those in the bucket that holds the threshold. Scores are computed anew in
//! each pass, row by row.

use rayon::prelude::*;

use crate::{Mask, Result};

/// Scores that can be computed row by row, as often as asked.
pub(crate) trait ScoreRows: Sync {
    fn rows(&self) -> usize;
    fn cols(&self) -> usize;
    /// Writes the scores of a row, none of them NaN.
    fn row(&self, row: usize, scores: &mut [f32]) -> Result<()>;
}

/// How many of `elements` a sparsity prunes: rounded down. A product that only the rounding of `level` keeps from a
/// whole number counts as that number: 0.29 of 100 is 29.
pub(crate) fn pruned_count(elements: usize, level: f64) -> usize {
    let product = elements as f64 * level;
    let nearest = product.round();
    let is_whole = (product - nearest).abs() <= nearest * (2.0 * f64::EPSILON);
    // Not above `elements`, whatever the rounding: the level is at most 1.
    (if is_whole { nearest } else { product } as usize).min(elements)
}

/// An integer that orders as the score does; both zeros are the same.
pub(crate) fn key(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// Sets the bits of all but the `pruned` lowest scores of a row; among equals the higher index goes first.
pub(crate) fn keep_best(scores: &[f32], pruned: usize, words: &mut [u64], keys: &mut Vec<u64>) {
    keys.clear();
    // Of equal scores the one of higher index is the smaller key.
    let order = |(i, score): (usize, &f32)| u64::from(key(*score)) << 32 | u64::from(u32::MAX - i as u32);
    keys.extend(scores.iter().enumerate().map(order));
    if pruned < keys.len() {
        let kept = match pruned {
            0 => &keys[..],
            _ => {
                keys.select_nth_unstable(pruned - 1);
                &keys[pruned..]
            }
        };
        for key in kept {
            let i = (u32::MAX - *key as u32) as usize;
            words[i / 64] |= 1 << (i % 64);
        }
    }
}

/// Masks that together keep all but the `pruned` lowest scores of several weights. Among equals those of a later
/// weight, row and column go first.
pub(crate) fn masks(weights: &[&dyn ScoreRows], pruned: usize) -> Result<Vec<Mask>> {
    let total: usize = weights.iter().map(|w| w.rows() * w.cols()).sum();
    let empty = || weights.iter().map(|w| Mask::empty(w.rows(), w.cols()));
    if pruned >= total {
        // The scores are looked at all the same: errors do not depend on the level.
        histogram(weights, |_| None)?;
        return Ok(empty().collect());
    }
    let upper = histogram(weights, |key| Some(key >> 16))?;
    let (bucket, below) = find(&upper, pruned as u64);
    let lower = histogram(weights, |key| (key >> 16 == bucket).then_some(key & 0xFFFF))?;
    let (rest, equal_pruned) = find(&lower, below);
    let threshold = bucket << 16 | rest;
    let mut equal_kept = lower[rest as usize] - equal_pruned;

    let mut masks: Vec<Mask> = empty().collect();
    for (weight, mask) in weights.iter().zip(&mut masks) {
        let cols = weight.cols();
        // Rows with equals of the threshold, in order: which of those stay is decided one after the other.
        let rows = mask.par_rows_mut().enumerate().map_init(
            || vec![0f32; cols],
            |scores, (row, words)| -> Result<Vec<u32>> {
                weight.row(row, scores)?;
                let mut equal = Vec::new();
                for (col, score) in scores.iter().enumerate() {
                    let key = key(*score);
                    words[col / 64] |= u64::from(key > threshold) << (col % 64);
                    if key == threshold {
                        equal.push(col as u32);
                    }
                }
                Ok(equal)
            },
        );
        let equal: Vec<Vec<u32>> = rows.collect::<Result<_>>()?;
        for (row, cols) in equal.iter().enumerate() {
            for col in cols.iter().take(usize::try_from(equal_kept).unwrap_or(usize::MAX)) {
                mask.keep(row, *col as usize);
            }
            equal_kept = equal_kept.saturating_sub(cols.len() as u64);
        }
    }
    Ok(masks)
}

/// Counts of 16-bit numbers made of the scores' keys.
fn histogram(weights: &[&dyn ScoreRows], number: impl Fn(u32) -> Option<u32> + Sync) -> Result<Vec<u64>> {
    const ROWS: usize = 64;
    let mut total = vec![0u64; 1 << 16];
    for weight in weights {
        let (rows, cols) = (if weight.cols() == 0 { 0 } else { weight.rows() }, weight.cols());
        // The first block's error, whichever thread is the quickest.
        let blocks: Vec<Result<Vec<u64>>> = (0..rows.div_ceil(ROWS))
            .into_par_iter()
            .fold_chunks(
                16,
                || Ok(vec![0u64; 1 << 16]),
                |counts: Result<Vec<u64>>, block| {
                    let mut counts = counts?;
                    let mut scores = vec![0f32; cols];
                    for row in block * ROWS..((block + 1) * ROWS).min(rows) {
                        weight.row(row, &mut scores)?;
                        for n in scores.iter().filter_map(|score| number(key(*score))) {
                            counts[n as usize] += 1;
                        }
                    }
                    Ok(counts)
                },
            )
            .collect();
        for counts in blocks {
            total.iter_mut().zip(counts?).for_each(|(total, count)| *total += count);
        }
    }
    Ok(total)
}

/// The bucket that holds the element of this rank, and the rank inside it.
fn find(counts: &[u64], rank: u64) -> (u32, u64) {
    let mut rest = rank;
    for (bucket, count) in counts.iter().enumerate() {
        if rest < *count {
            return (bucket as u32, rest);
        }
        rest -= count;
    }
    unreachable!("rank {rank} is beyond all counts")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Scores in memory.
    pub(in crate::select) struct Stored {
        pub(in crate::select) rows: usize,
        pub(in crate::select) cols: usize,
        pub(in crate::select) scores: Vec<f32>,
    }

    impl ScoreRows for Stored {
        fn rows(&self) -> usize {
            self.rows
        }
        fn cols(&self) -> usize {
            self.cols
        }
        fn row(&self, row: usize, scores: &mut [f32]) -> Result<()> {
            scores.copy_from_slice(&self.scores[row * self.cols..][..self.cols]);
            Ok(())
        }
    }

    /// The rule as a sentence: sort by score, then the higher index first, and drop the first ones.
    fn reference(scores: &[f32], pruned: usize) -> Vec<bool> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[a].partial_cmp(&scores[b]).unwrap().then(b.cmp(&a)));
        let mut kept = vec![true; scores.len()];
        order.into_iter().take(pruned).for_each(|i| kept[i] = false);
        kept
    }

    fn adversarial() -> impl Strategy<Value = f32> {
        prop_oneof![
            4 => (-3i8..=3).prop_map(f32::from),
            1 => Just(-0.0f32),
            1 => prop_oneof![Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(1e-45f32), Just(-1e-45f32), Just(f32::MAX)],
            3 => -1.0f32..1.0,
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn masks_are_those_of_the_sorted_scores(
            parts in proptest::collection::vec((0usize..80, 0usize..70), 1..4).prop_flat_map(|shapes| {
                shapes.into_iter().map(|(rows, cols)| (Just((rows, cols)), proptest::collection::vec(adversarial(), rows * cols))).collect::<Vec<_>>()
            }),
            share in 0.0f64..=1.0,
        ) {
            let stored: Vec<Stored> = parts.into_iter().map(|((rows, cols), scores)| Stored { rows, cols, scores }).collect();
            let all: Vec<f32> = stored.iter().flat_map(|s| s.scores.clone()).collect();
            let pruned = pruned_count(all.len(), share);
            let weights: Vec<&dyn ScoreRows> = stored.iter().map(|s| s as &dyn ScoreRows).collect();
            let found = masks(&weights, pruned).unwrap();
            let mut expected = reference(&all, pruned).into_iter();
            for mask in &found {
                for row in 0..mask.rows() {
                    for col in 0..mask.cols() {
                        prop_assert_eq!(mask.is_kept(row, col), expected.next().unwrap());
                    }
                }
            }
            let (mut words, mut keys) = (vec![0u64; all.len().div_ceil(64)], Vec::new());
            keep_best(&all, pruned, &mut words, &mut keys);
            for (i, kept) in reference(&all, pruned).into_iter().enumerate() {
                prop_assert_eq!(words[i / 64] >> (i % 64) & 1 == 1, kept);
            }
        }
    }

    #[test]
    fn counts_round_down_and_stay_in_range() {
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|level| pruned_count(3, level)), [0, 1, 2, 3]);
        assert_eq!([0.29, 0.57, 0.289].map(|level| pruned_count(100, level)), [29, 57, 28]);
        assert!(key(f32::NEG_INFINITY) < key(-1.0) && key(-0.0) == key(0.0) && key(1e-45) > key(0.0));
    }
}
