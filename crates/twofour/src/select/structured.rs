//! Selection of blocks, rows and columns: those of the lowest mean score go.

use std::{cmp::Reverse, ops::Range};

use rayon::prelude::*;

use super::unstructured::{ScoreRows, pruned_count};
use crate::{Mask, Result, mask::set_range};

/// The blocks `[height, width]` that a matrix is cut into; the last ones have what is left.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    rows: usize,
    cols: usize,
    height: usize,
    width: usize,
}

impl Cut {
    pub(crate) fn new((rows, cols): (usize, usize), [height, width]: [usize; 2]) -> Self {
        Cut { rows, cols, height, width }
    }

    /// Rows of blocks; 0 where the matrix has no elements.
    pub(crate) fn down(&self) -> usize {
        if self.cols == 0 { 0 } else { self.rows.div_ceil(self.height) }
    }

    /// Blocks in a row of blocks.
    pub(crate) fn across(&self) -> usize {
        self.cols.div_ceil(self.width)
    }

    /// All blocks.
    pub(crate) fn count(&self) -> usize {
        self.down() * self.across()
    }

    pub(crate) fn rows_of(&self, block_row: usize) -> Range<usize> {
        block_row * self.height..(block_row + 1).saturating_mul(self.height).min(self.rows)
    }

    pub(crate) fn cols_of(&self, block_col: usize) -> Range<usize> {
        block_col * self.width..(block_col + 1).saturating_mul(self.width).min(self.cols)
    }
}

/// The mask without the share `level` of blocks, those of the lowest mean score; among equals the later one goes first.
/// Where infinite scores of both signs meet, the mean counts as the highest.
pub(crate) fn mask(scored: &impl ScoreRows, unit: [usize; 2], level: f64) -> Result<Mask> {
    let (rows, cols) = (scored.rows(), scored.cols());
    let cut = Cut::new((rows, cols), unit);
    let means: Vec<Result<Vec<f64>>> = (0..cut.down())
        .into_par_iter()
        .map_init(
            || vec![0f32; cols],
            |scores, block_row| {
                let mut sums = vec![0f64; cut.across()];
                for row in cut.rows_of(block_row) {
                    scored.row(row, scores)?;
                    for (sum, scores) in sums.iter_mut().zip(scores.chunks(cut.width)) {
                        *sum += scores.iter().map(|score| f64::from(*score)).sum::<f64>();
                    }
                }
                let height = cut.rows_of(block_row).len();
                for (block_col, sum) in sums.iter_mut().enumerate() {
                    *sum = comparable(*sum / (height * cut.cols_of(block_col).len()) as f64);
                }
                Ok(sums)
            },
        )
        .collect();
    let mut all = Vec::with_capacity(cut.count());
    for means in means {
        all.extend(means?);
    }
    let mut order: Vec<usize> = (0..all.len()).collect();
    order.sort_unstable_by(|a, b| all[*a].total_cmp(&all[*b]).then(Reverse(a).cmp(&Reverse(b))));
    let mut kept = vec![true; all.len()];
    order[..pruned_count(all.len(), level)].iter().for_each(|block| kept[*block] = false);

    let mut mask = Mask::empty(rows, cols);
    mask.par_rows_mut().enumerate().for_each(|(row, words)| {
        let kept = &kept[row / cut.height * cut.across()..][..cut.across()];
        for (block_col, _) in kept.iter().enumerate().filter(|(_, kept)| **kept) {
            set_range(words, cut.cols_of(block_col));
        }
    });
    Ok(mask)
}

/// A sum or mean that orders by [`f64::total_cmp`] as numbers do: one zero, and the highest for what is undefined.
pub(super) fn comparable(value: f64) -> f64 {
    if value.is_nan() { f64::INFINITY } else { value + 0.0 }
}

#[cfg(test)]
mod tests {
    use super::{super::unstructured::tests::Stored, *};
    use proptest::prelude::*;

    /// The rule as a sentence: sort the blocks by mean, then the later first, and drop the first ones.
    fn reference(stored: &Stored, [height, width]: [usize; 2], level: f64) -> Mask {
        let (rows, cols) = (stored.rows, stored.cols);
        let corners: Vec<(usize, usize)> =
            (0..rows).step_by(height).flat_map(|row| (0..cols).step_by(width).map(move |col| (row, col))).collect();
        let inside = |(row, col): (usize, usize), (r, c): (usize, usize)| {
            (row..row + height).contains(&r) && (col..col + width).contains(&c)
        };
        let places = || (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c)));
        let mean = |corner| {
            let own: Vec<f64> =
                places().filter(|p| inside(corner, *p)).map(|(r, c)| f64::from(stored.scores[r * cols + c])).collect();
            own.iter().sum::<f64>() / own.len() as f64
        };
        let mut order: Vec<usize> = (0..corners.len()).collect();
        let means: Vec<f64> = corners.iter().map(|corner| mean(*corner)).collect();
        order.sort_by(|a, b| means[*a].partial_cmp(&means[*b]).unwrap().then(b.cmp(a)));
        let dropped = &order[..pruned_count(corners.len(), level)];
        Mask::from_fn(rows, cols, |r, c| !dropped.iter().any(|block| inside(corners[*block], (r, c))))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn blocks_are_those_of_the_sorted_means(
            (rows, cols, scores) in (0usize..14, 0usize..150)
                .prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec((-3i8..=3).prop_map(f32::from), r * c))),
            unit in (1usize..16, prop_oneof![1usize..9, 60usize..200]),
            level in 0.0f64..=1.0,
        ) {
            let stored = Stored { rows, cols, scores };
            for unit in [[unit.0, unit.1], [1, cols.max(1)], [rows.max(1), 1]] {
                let found = mask(&stored, unit, level).unwrap();
                prop_assert_eq!(&found, &reference(&stored, unit, level));
                // More of the share keeps less of the same.
                let lower = mask(&stored, unit, level / 2.0).unwrap();
                prop_assert!((0..rows).all(|r| (0..cols).all(|c| lower.is_kept(r, c) || !found.is_kept(r, c))));
            }
        }
    }

    #[test]
    fn infinite_scores_are_the_highest_and_a_huge_block_is_the_whole_matrix() {
        let scores = vec![f32::INFINITY, f32::NEG_INFINITY, 1.0, 2.0];
        let stored = Stored { rows: 2, cols: 2, scores };
        let rows = mask(&stored, [1, 2], 0.5).unwrap();
        assert!(rows.is_kept(0, 0) && rows.is_kept(0, 1) && !rows.is_kept(1, 0));
        assert_eq!(mask(&stored, [usize::MAX, usize::MAX], 0.9).unwrap(), Mask::full(2, 2));
        assert_eq!(mask(&stored, [usize::MAX, usize::MAX], 1.0).unwrap(), Mask::empty(2, 2));
    }
}
