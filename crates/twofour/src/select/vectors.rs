//! V:N:M selection: four columns of each M for V rows, and the N best of those four in each row.

use rayon::prelude::*;

use super::{Sparsity, nm, structured::comparable, unstructured::ScoreRows};
use crate::{Mask, Pattern, Result, first_error::first_error, mask::stride};

/// The mask of a V:N:M pattern. Columns are compared by the sum of their scores over the rows; ties go to the lower
/// index, of columns and inside a row. The last rows and columns are as many as are left.
pub(crate) fn mask(scored: &impl ScoreRows, v: usize, pattern: Pattern) -> Result<Mask> {
    let (rows, cols) = (scored.rows(), scored.cols());
    let mut mask = Mask::empty(rows, cols);
    let (height, stride) = (v.min(rows).max(1), stride(cols).max(1));
    first_error(mask.par_bands_mut(height).enumerate(), |(band, words)| {
        let first = band * height;
        let mut scores = vec![0f32; words.len() / stride * cols];
        for (row, scores) in scores.chunks_mut(cols).enumerate() {
            scored.row(first + row, scores)?;
        }
        let mut sums = vec![0f64; cols];
        for row in scores.chunks(cols) {
            sums.iter_mut().zip(row).for_each(|(sum, score)| *sum += f64::from(*score));
        }
        let columns: Vec<Vec<usize>> =
            sums.chunks(pattern.m()).enumerate().map(|(group, sums)| best_columns(group * pattern.m(), sums)).collect();
        for (scores, words) in scores.chunks(cols).zip(words.chunks_mut(stride)) {
            for columns in &columns {
                let mut own = [0f32; Sparsity::VECTOR_COLUMNS];
                own.iter_mut().zip(columns).for_each(|(own, col)| *own = scores[*col]);
                let kept = nm::best(&own[..columns.len()], pattern.n());
                for (i, col) in columns.iter().enumerate() {
                    words[col / 64] |= (kept >> i & 1) << (col % 64);
                }
            }
        }
        Ok(())
    })?;
    Ok(mask)
}

/// The columns of the highest sums, ascending.
fn best_columns(first: usize, sums: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sums.len()).collect();
    order.sort_by(|a, b| comparable(sums[*b]).total_cmp(&comparable(sums[*a])));
    order.truncate(Sparsity::VECTOR_COLUMNS);
    order.sort_unstable();
    order.into_iter().map(|col| first + col).collect()
}

#[cfg(test)]
mod tests {
    use super::{super::unstructured::tests::Stored, *};
    use proptest::prelude::*;

    /// The rule as a sentence, element by element.
    fn is_kept(stored: &Stored, v: usize, pattern: Pattern, row: usize, col: usize) -> bool {
        let at = |r: usize, c: usize| stored.scores[r * stored.cols + c];
        let group = col / pattern.m() * pattern.m()..(col / pattern.m() * pattern.m() + pattern.m()).min(stored.cols);
        let band = row / v * v..(row / v * v + v).min(stored.rows);
        let sum = |c: usize| band.clone().map(|r| f64::from(at(r, c))).sum::<f64>();
        let in_front = |c: usize| {
            group.clone().filter(|other| sum(*other) > sum(c) || sum(*other) == sum(c) && *other < c).count()
        };
        let columns: Vec<usize> = group.clone().filter(|c| in_front(*c) < 4).collect();
        let better = |c: &&usize| at(row, **c) > at(row, col) || at(row, **c) == at(row, col) && **c < col;
        columns.contains(&col) && columns.iter().filter(better).count() < pattern.n()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn vectors_are_those_of_the_reference(
            (rows, cols, scores) in (0usize..10, 0usize..80)
                .prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec((-3i8..=3).prop_map(f32::from), r * c))),
            v in 1usize..12,
            (n, m) in (1usize..=4, 4usize..=32),
        ) {
            let pattern = Pattern::new(n, m).unwrap();
            let stored = Stored { rows, cols, scores };
            let found = mask(&stored, v, pattern).unwrap();
            let expected = Mask::from_fn(rows, cols, |row, col| is_kept(&stored, v, pattern, row, col));
            prop_assert_eq!(found, expected);
        }
    }
}
