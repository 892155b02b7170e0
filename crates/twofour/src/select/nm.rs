//! N:M selection along one axis: the N best scores of each group of M.

use rayon::prelude::*;

use super::band::{self, BandRule};
use crate::{
    Axis, Compressed, Element, Error, Mask, MatrixRef, Pattern, Result,
    widest::{Inlined, widest},
};

/// Keeps the `n` elements of largest magnitude in each group of `m`.
///
/// Ties go to the lower index, so a group always keeps exactly `n` (a last, shorter group keeps up to `n`). The
/// result is the same on every engine and with every number of threads.
///
/// # Errors
/// [`Error::NotANumber`] with the place of the first NaN.
///
/// ```
/// use twofour::{Axis, MatrixRef, Pattern, select};
/// let w = [0.1f32, -3.0, 2.0, 0.0, 1.0, 1.0, 1.0, 1.0];
/// let mask = select::magnitude(MatrixRef::new(1, 8, &w)?, Pattern::TWO_FOUR, Axis::Row)?;
/// assert_eq!(mask.row_words(0), [0b0011_0110]);
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn magnitude<T: Element>(matrix: MatrixRef<'_, T>, pattern: Pattern, axis: Axis) -> Result<Mask> {
    select(matrix, pattern, axis, |v| v.to_f32().abs())
}

/// Keeps the `n` elements of highest score in each group of `m`; ties go to the lower index.
///
/// `scores` is a matrix of the weight's shape, from whatever criterion. -0.0 and +0.0 are equal scores.
///
/// # Errors
/// [`Error::NotANumber`] with the place of the first NaN score.
pub fn by_score(scores: MatrixRef<'_, f32>, pattern: Pattern, axis: Axis) -> Result<Mask> {
    select(scores, pattern, axis, |v| v)
}

fn select<T: Element>(
    matrix: MatrixRef<'_, T>,
    pattern: Pattern,
    axis: Axis,
    score: impl Fn(T) -> f32 + Sync,
) -> Result<Mask> {
    band::mask(matrix, &GroupRule { pattern, axis, score })
}

/// The best scores of each group along an axis.
pub(crate) struct GroupRule<F> {
    pattern: Pattern,
    axis: Axis,
    score: F,
}

/// The rule of [`magnitude`].
pub(crate) fn magnitude_rule<T: Element>(pattern: Pattern, axis: Axis) -> GroupRule<impl Fn(T) -> f32 + Sync> {
    GroupRule { pattern, axis, score: |v: T| v.to_f32().abs() }
}

impl<T: Element, F: Fn(T) -> f32 + Sync> BandRule<T> for GroupRule<F> {
    fn height(&self) -> usize {
        match self.axis {
            Axis::Row => 1,
            Axis::Column => self.pattern.m(),
        }
    }

    fn choose(&self, band: MatrixRef<'_, T>, words: &mut [u64]) -> bool {
        match self.axis {
            Axis::Row => self.of_row(band.data(), words),
            Axis::Column => self.along_columns(band, words),
        }
    }
}

impl<F> GroupRule<F> {
    fn two_of_four<T: Element>(&self, row: &[T], words: &mut [u64]) -> bool
    where
        F: Fn(T) -> f32,
    {
        let (whole, rest) = row.as_chunks::<64>();
        let mut nan = widest(Sixteens { score: &self.score, whole, words: &mut *words });
        let (groups, last) = rest.as_chunks::<4>();
        let mut tail = 0;
        for (group, values) in groups.iter().enumerate() {
            let scores = values.map(&self.score);
            nan |= scores.iter().any(|s| s.is_nan());
            tail |= u64::from(best_two_of_four(scores)) << (4 * group);
        }
        let mut scores = [0f32; 3];
        for (s, v) in scores.iter_mut().zip(last) {
            *s = (self.score)(*v);
            nan |= s.is_nan();
        }
        if !last.is_empty() {
            tail |= best(&scores[..last.len()], 2) << (4 * groups.len());
        }
        if let Some(word) = words.get_mut(whole.len()) {
            *word |= tail;
        }
        nan
    }

    fn of_row<T: Element>(&self, row: &[T], words: &mut [u64]) -> bool
    where
        F: Fn(T) -> f32,
    {
        match self.pattern.m() {
            _ if self.pattern == Pattern::TWO_FOUR => self.two_of_four(row, words),
            8 => self.ranked::<T, 8>(row, words),
            16 => self.ranked::<T, 16>(row, words),
            32 => self.ranked::<T, 32>(row, words),
            _ => self.along_a_row(row, 0, words),
        }
    }

    /// Groups whose length divides a word: all comparisons of a group with one element are one operation on vectors.
    fn ranked<T: Element, const M: usize>(&self, row: &[T], words: &mut [u64]) -> bool
    where
        F: Fn(T) -> f32,
    {
        let (groups, rest) = row.as_chunks::<M>();
        let nan = widest(Ranked { score: &self.score, groups, n: self.pattern.n() as u32, words: &mut *words });
        self.along_a_row(rest, groups.len(), words) | nan
    }

    /// The groups from `first` on.
    fn along_a_row<T: Element>(&self, row: &[T], first: usize, words: &mut [u64]) -> bool
    where
        F: Fn(T) -> f32,
    {
        let m = self.pattern.m();
        let mut nan = false;
        let mut scores = [0f32; Pattern::MAX_M];
        for (group, values) in (first..).zip(row.chunks(m)) {
            let scores = &mut scores[..values.len()];
            for (s, v) in scores.iter_mut().zip(values) {
                *s = (self.score)(*v);
                nan |= s.is_nan();
            }
            let kept = best(scores, self.pattern.n());
            let bit = group * m;
            words[bit / 64] |= kept << (bit % 64);
            if bit % 64 + values.len() > 64 {
                words[bit / 64 + 1] |= kept >> (64 - bit % 64);
            }
        }
        nan
    }

    fn along_columns<T: Element>(&self, band: MatrixRef<'_, T>, words: &mut [u64]) -> bool
    where
        F: Fn(T) -> f32,
    {
        let height = band.rows();
        let stride = words.len() / height;
        let mut nan = false;
        let mut scores = [0f32; Pattern::MAX_M];
        for col in 0..band.cols() {
            for (i, s) in scores[..height].iter_mut().enumerate() {
                *s = (self.score)(band.row(i)[col]);
                nan |= s.is_nan();
            }
            let kept = best(&scores[..height], self.pattern.n());
            for i in 0..height {
                words[i * stride + col / 64] |= (kept >> i & 1) << (col % 64);
            }
        }
        nan
    }
}

/// [`best_two_of_four`] of sixteen groups at a time, whose comparisons are the same operations on every lane.
struct Sixteens<'a, T, F> {
    score: &'a F,
    whole: &'a [[T; 64]],
    words: &'a mut [u64],
}

impl<T: Element, F: Fn(T) -> f32> Inlined for Sixteens<'_, T, F> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let mut nan = 0u32;
        for (word, values) in self.words.iter_mut().zip(self.whole) {
            let mut scores = [[0f32; 16]; 4];
            for group in 0..16 {
                for element in 0..4 {
                    scores[element][group] = (self.score)(values[4 * group + element]);
                }
            }
            let [a, b, c, d] = scores;
            let mut kept = [0u32; 16];
            for i in 0..16 {
                let (a, b, c, d) = (a[i], b[i], c[i], d[i]);
                let (ab, ac, ad) = (u32::from(a >= b), u32::from(a >= c), u32::from(a >= d));
                let (bc, bd, cd) = (u32::from(b >= c), u32::from(b >= d), u32::from(c >= d));
                // Of its three comparisons an element that is kept wins two.
                let first = (ab + ac + ad) >> 1;
                let second = (1 + bc + bd - ab) >> 1;
                let third = (2 + cd - ac - bc) >> 1;
                let fourth = (3 - ad - bd - cd) >> 1;
                kept[i] = first | second << 1 | third << 2 | fourth << 3;
                nan |= u32::from(a.is_nan()) | u32::from(b.is_nan()) | u32::from(c.is_nan()) | u32::from(d.is_nan());
            }
            for (group, kept) in kept.iter().enumerate() {
                *word |= u64::from(*kept) << (4 * group);
            }
        }
        nan != 0
    }
}

/// [`best`] of whole groups of `M`.
struct Ranked<'a, T, F, const M: usize> {
    score: &'a F,
    groups: &'a [[T; M]],
    n: u32,
    words: &'a mut [u64],
}

impl<T: Element, F: Fn(T) -> f32, const M: usize> Inlined for Ranked<'_, T, F, M> {
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        let mut nan = 0u32;
        for (word, groups) in self.words.iter_mut().zip(self.groups.chunks(64 / M)) {
            for (place, values) in groups.iter().enumerate() {
                let scores: [f32; M] = std::array::from_fn(|i| (self.score)(values[i]));
                let mut better = [0u32; M];
                for i in 0..M {
                    for j in 0..M {
                        let wins = (scores[i] > scores[j]) | ((scores[i] == scores[j]) & (i < j));
                        better[j] += u32::from(wins);
                    }
                    nan |= u32::from(scores[i].is_nan());
                }
                let kept = (0..M).fold(0, |kept, i| kept | u64::from(better[i] < self.n) << i);
                *word |= kept << (M * place);
            }
        }
        nan != 0
    }
}

/// Sets the bits of the best scores of each group of a row of scores; returns whether one is NaN.
pub(crate) fn best_of_row(pattern: Pattern, scores: &[f32], words: &mut [u64]) -> bool {
    let rule = GroupRule { pattern, axis: Axis::Row, score: |score: f32| score };
    rule.of_row(scores, words)
}

/// The two highest of four scores, as bits; ties go to the lower index.
pub(crate) fn best_two_of_four(s: [f32; 4]) -> u8 {
    /// Who is kept, by the outcomes of the six comparisons of an earlier element with a later one.
    const KEPT: [u8; 64] = {
        const PAIRS: [(usize, usize); 6] = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];
        let mut table = [0; 64];
        let mut outcomes = 0;
        while outcomes < 64 {
            let mut better = [0; 4];
            let mut pair = 0;
            while pair < 6 {
                let (earlier, later) = PAIRS[pair];
                better[if outcomes >> pair & 1 == 1 { later } else { earlier }] += 1;
                pair += 1;
            }
            let mut i = 0;
            while i < 4 {
                table[outcomes] |= ((better[i] < 2) as u8) << i;
                i += 1;
            }
            outcomes += 1;
        }
        table
    };
    let wins = [s[0] >= s[1], s[0] >= s[2], s[0] >= s[3], s[1] >= s[2], s[1] >= s[3], s[2] >= s[3]];
    KEPT[wins.iter().rev().fold(0, |bits, won| bits << 1 | usize::from(*won))]
}

/// The `n` highest of at most 64 scores, as bits; ties go to the lower index.
pub(crate) fn best(scores: &[f32], n: usize) -> u64 {
    let mut kept = 0;
    for (i, a) in scores.iter().enumerate() {
        let better = scores[..i].iter().filter(|b| *b >= a).count() + scores[i + 1..].iter().filter(|b| *b > a).count();
        kept |= u64::from(better < n) << i;
    }
    kept
}

/// An error with the place of the first NaN, if there is one.
pub(crate) fn reject_nan<T: Element>(matrix: MatrixRef<'_, T>) -> Result<()> {
    let rows = if matrix.cols() == 0 { 0 } else { matrix.rows() };
    let found = (0..rows)
        .into_par_iter()
        .find_map_first(|row| matrix.row(row).iter().position(|v| v.to_f32().is_nan()).map(|col| (row, col)));
    match found {
        None => Ok(()),
        Some((row, col)) => Err(Error::NotANumber { row, col }),
    }
}

impl<T: Element> Compressed<T> {
    /// Prunes to the two largest magnitudes of each group ([`magnitude`]) and compresses.
    ///
    /// # Errors
    /// [`Error::NotANumber`] with the place of the first NaN.
    pub fn from_pruned(matrix: MatrixRef<'_, T>) -> Result<Self> {
        Self::from_masked(matrix, &magnitude(matrix, Pattern::TWO_FOUR, Axis::Row)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The rule as a sentence: sort by descending score, then by index, and keep the first n.
    fn reference(scores: &[f32], n: usize) -> u64 {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).unwrap().then(a.cmp(&b)));
        order.into_iter().take(n).fold(0, |bits, i| bits | 1 << i)
    }

    /// Few distinct values, so that ties and zeros of both signs are common; infinities too.
    fn adversarial() -> impl Strategy<Value = f32> {
        prop_oneof![
            4 => (-3i8..=3).prop_map(f32::from),
            1 => Just(-0.0f32),
            1 => prop_oneof![Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(f32::MIN_POSITIVE), Just(1e-45f32)],
            2 => -1e3f32..1e3,
        ]
    }

    proptest! {
        #[test]
        fn the_best_two_of_four_are_those_of_the_reference(scores in proptest::array::uniform4(adversarial())) {
            prop_assert_eq!(u64::from(best_two_of_four(scores)), reference(&scores, 2));
        }

        #[test]
        fn the_best_are_those_of_the_reference(scores in proptest::collection::vec(adversarial(), 0..64), n in 1usize..64) {
            prop_assert_eq!(best(&scores, n), reference(&scores, n));
        }

        #[test]
        fn both_axes_agree_and_obey(
            (rows, cols, data) in (0usize..12, 0usize..140).prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec(adversarial(), r * c))),
            n in 1usize..5,
            m in prop_oneof![4usize..12, Just(8), Just(16), Just(32)],
        ) {
            let pattern = Pattern::new(n, m).unwrap();
            let matrix = MatrixRef::new(rows, cols, &data).unwrap();
            let by_rows = magnitude(matrix, pattern, Axis::Row).unwrap();
            for (axis, pattern) in [(Axis::Row, pattern), (Axis::Column, pattern), (Axis::Row, Pattern::TWO_FOUR)] {
                super::super::band::tests::one_pass_agrees(matrix, &magnitude_rule(pattern, axis));
            }
            prop_assert!(by_rows.verify(pattern, Axis::Row).is_ok());
            for row in 0..rows {
                for (group, values) in matrix.row(row).chunks(pattern.m()).enumerate() {
                    let scores: Vec<f32> = values.iter().map(|v| v.abs()).collect();
                    prop_assert_eq!(by_rows.bits(row, group * pattern.m(), values.len()), reference(&scores, n));
                }
            }
            let transposed = matrix.transposed();
            let by_columns = magnitude(MatrixRef::new(cols, rows, &transposed).unwrap(), pattern, Axis::Column).unwrap();
            prop_assert_eq!(by_columns.transposed(), by_rows);
        }
    }

    #[test]
    fn the_first_nan_is_named() {
        let mut data = vec![1f32; 40];
        data[33] = f32::NAN;
        data[38] = f32::NAN;
        let error = magnitude(MatrixRef::new(4, 10, &data).unwrap(), Pattern::TWO_FOUR, Axis::Row).unwrap_err();
        assert!(matches!(error, Error::NotANumber { row: 3, col: 3 }), "{error}");
    }
}
