//! The best of the 90 patterns, by a search over column counts.
//!
//! A pattern has two elements in each row and each column. Its upper two rows leave one of 19 vectors of column counts
//! (six of kind 2200, twelve of 2110, one of 1111), and its lower two rows must complete them to two everywhere. So it
//! suffices to know the best upper pair and the best lower pair for each vector: about 170 additions and comparisons
//! instead of 90 sums of eight.
//!
//! Scores are f32: of a row the sum of its two, of two rows the sum of those, of the tile the sum of those. Of equal
//! scores the first in lexicographic order of the rows' pairs wins, where pairs are ordered (0,1) (0,2) (0,3) (1,2)
//! (1,3) (2,3); first among the pairs for one vector, then among vectors.
//!
//! Because rounding is monotone, the best upper and the best lower pair of a vector have its best rounded sum: no
//! pattern has a larger sum, added up in that order, than the one that is found.
//!
//! # Sums that would overflow
//! A sum of eight scores above `f32::MAX / 8` could be infinite, and all infinite sums are equal. A tile that holds
//! such a score, or infinity, is therefore searched with its scores divided by 256 and infinity counting as `f32::MAX /
//! 16`, which is more than eight of the largest finite scores: first the number of infinities decides, then the finite
//! sum.

/// The pairs a row can keep, as bits, in lexicographic order.
const PAIRS: [u16; 6] = [0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100];

/// Number of column-count vectors of two rows.
const VECTORS: usize = 19;

/// For the pairs `6 * first + second` of two rows: the vector that they leave, and the one that they complete.
const LEAVES: [u8; 36] = TABLES.0;
const COMPLETES: [u8; 36] = TABLES.1;

const TABLES: ([u8; 36], [u8; 36]) = {
    /// Column counts as four base-4 digits.
    const fn counts(pairs: usize) -> u16 {
        let (a, b) = (PAIRS[pairs / 6], PAIRS[pairs % 6]);
        let mut sum = 0;
        let mut c = 0;
        while c < 4 {
            sum += ((a >> c & 1) + (b >> c & 1)) << (2 * c);
            c += 1;
        }
        sum
    }
    let mut vectors = [0u16; VECTORS];
    let mut found = 0;
    let mut leaves = [0u8; 36];
    let mut i = 0;
    while i < 36 {
        let mut v = 0;
        while v < found && vectors[v] != counts(i) {
            v += 1;
        }
        if v == found {
            vectors[v] = counts(i);
            found += 1;
        }
        leaves[i] = v as u8;
        i += 1;
    }
    assert!(found == VECTORS);
    let mut completes = [0u8; 36];
    let mut i = 0;
    while i < 36 {
        let mut v = 0;
        // 0b10101010 is two in every column.
        while vectors[v] != 0b1010_1010 - counts(i) {
            v += 1;
        }
        completes[i] = v as u8;
        i += 1;
    }
    (leaves, completes)
};

/// The mask of largest total score. `scores` are not negative and not NaN. Where the tile is cut off by the matrix's
/// edge the mask is the best with at most two elements in each row and column.
pub(super) fn best(scores: &[f32; 16], inside: u16) -> u16 {
    let scores = &without_overflow(*scores);
    if inside != u16::MAX {
        return best_of_cut_tile(scores, inside);
    }
    let rows: [[f32; 6]; 4] = std::array::from_fn(|r| {
        let s = &scores[4 * r..][..4];
        [s[0] + s[1], s[0] + s[2], s[0] + s[3], s[1] + s[2], s[1] + s[3], s[2] + s[3]]
    });
    let upper = best_by_vector(&rows[0], &rows[1], &LEAVES);
    let lower = best_by_vector(&rows[2], &rows[3], &COMPLETES);
    let (mut score, mut pairs) = (f32::NEG_INFINITY, (usize::MAX, 0));
    for (&(upper_score, upper), &(lower_score, lower)) in upper.iter().zip(&lower) {
        let total = upper_score + lower_score;
        if total > score || total == score && upper < pairs.0 {
            (score, pairs) = (total, (upper, lower));
        }
    }
    let two_rows = |pairs: usize| PAIRS[pairs / 6] | PAIRS[pairs % 6] << 4;
    two_rows(pairs.0) | two_rows(pairs.1) << 8
}

/// Scores in the same order whose sums are finite; the scores themselves, but for huge ones.
fn without_overflow(scores: [f32; 16]) -> [f32; 16] {
    if scores.iter().all(|s| *s <= f32::MAX / 8.0) {
        return scores;
    }
    scores.map(|s| if s == f32::INFINITY { f32::MAX / 16.0 } else { s / 256.0 })
}

/// For each vector the best score of two rows and the first pairs that reach it.
fn best_by_vector(first: &[f32; 6], second: &[f32; 6], vector: &[u8; 36]) -> [(f32, usize); VECTORS] {
    let mut best = [(f32::NEG_INFINITY, 0); VECTORS];
    for (pairs, v) in vector.iter().enumerate() {
        let score = first[pairs / 6] + second[pairs % 6];
        let slot = &mut best[usize::from(*v)];
        if score > slot.0 {
            *slot = (score, pairs);
        }
    }
    best
}

/// Exhaustive, for the few tiles at a matrix's edge: with a row or column missing, two in every row and column cannot
/// be had.
fn best_of_cut_tile(scores: &[f32; 16], inside: u16) -> u16 {
    // Larger sets first, so that a tie keeps more.
    const CHOICES: [u16; 11] = [0b0011, 0b0101, 0b1001, 0b0110, 0b1010, 0b1100, 0b0001, 0b0010, 0b0100, 0b1000, 0];
    fn extend(scores: &[f32; 16], inside: u16, row: usize, kept: u16, score: f32, best: &mut (f32, u16)) {
        if row == 4 {
            if score > best.0 {
                *best = (score, kept);
            }
            return;
        }
        for choice in CHOICES {
            let with = kept | choice << (4 * row);
            let fits = (0..4).all(|c| (with & 0x1111 << c).count_ones() <= 2);
            if fits && choice << (4 * row) & !inside == 0 {
                let gain: f32 = (0..4).filter(|c| choice >> c & 1 == 1).map(|c| scores[4 * row + c]).sum();
                extend(scores, inside, row + 1, with, score + gain, best);
            }
        }
    }
    let mut best = (f32::NEG_INFINITY, 0);
    extend(scores, inside, 0, 0, 0.0, &mut best);
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// All 90 patterns in lexicographic order of their rows' pairs.
    fn patterns() -> Vec<u16> {
        let mut all = Vec::new();
        for p in 0..6usize.pow(4) {
            let rows = [p / 216, p / 36 % 6, p / 6 % 6, p % 6].map(|i| PAIRS[i]);
            let mask = rows.iter().rev().fold(0, |mask, row| mask << 4 | row);
            if (0..4).all(|c| (mask & 0x1111u16 << c).count_ones() == 2) {
                all.push(mask);
            }
        }
        all
    }

    fn mass(scores: &[f32; 16], mask: u16) -> f64 {
        (0..16).filter(|i| mask >> i & 1 == 1).map(|i| f64::from(scores[i])).sum()
    }

    #[test]
    fn there_are_ninety_patterns() {
        assert_eq!(patterns().len(), 90);
    }

    proptest! {
        #[test]
        fn whole_numbers_give_the_first_of_the_best_patterns(scores in proptest::array::uniform16((0u8..6).prop_map(f32::from))) {
            // Sums of small whole numbers are exact, so ties are real ties.
            let all = patterns();
            let top = all.iter().map(|m| mass(&scores, *m)).fold(f64::NEG_INFINITY, f64::max);
            let first = all.into_iter().find(|m| mass(&scores, *m) == top).unwrap();
            prop_assert_eq!(best(&scores, u16::MAX), first);
        }

        #[test]
        fn any_numbers_give_the_best_but_for_rounding(scores in proptest::array::uniform16(prop_oneof![0f32..1.0, 0f32..1e30, Just(1e-45f32)])) {
            let found = best(&scores, u16::MAX);
            prop_assert!(patterns().contains(&found));
            let top = patterns().iter().map(|m| mass(&scores, *m)).fold(f64::NEG_INFINITY, f64::max);
            prop_assert!(mass(&scores, found) >= top * (1.0 - 1e-6), "{} instead of {top}", mass(&scores, found));
        }

        #[test]
        fn a_cut_tile_never_does_worse_than_a_pattern(scores in proptest::array::uniform16((0u8..6).prop_map(f32::from)), rows in 1usize..=4, cols in 1usize..=4) {
            let inside = (0..16).filter(|i| i / 4 < rows && i % 4 < cols).fold(0u16, |b, i| b | 1 << i);
            let found = best_of_cut_tile(&scores, inside);
            prop_assert_eq!(found & !inside, 0);
            prop_assert!((0..4).all(|i| (found & 0xF << (4 * i)).count_ones() <= 2 && (found & 0x1111 << i).count_ones() <= 2));
            for pattern in patterns() {
                prop_assert!(mass(&scores, found) >= mass(&scores, pattern & inside));
            }
        }
    }

    /// The sum in the order in which the search adds up.
    fn sum_as_searched(s: &[f32; 16], mask: u16) -> f32 {
        let row = |r: usize| (0..4).filter(|c| mask >> (4 * r + c) & 1 == 1).map(|c| s[4 * r + c]).sum::<f32>();
        (row(0) + row(1)) + (row(2) + row(3))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 8 * ProptestConfig::default().cases, ..Default::default() })]
        /// Brute force, with ties and with sums that round: no pattern beats the one found by a single bit.
        #[test]
        fn no_pattern_has_a_larger_sum(scores in proptest::array::uniform16(prop_oneof![
            3 => (0u8..3).prop_map(f32::from),
            2 => 0f32..1.0,
            1 => Just(1.0 + f32::EPSILON),
            1 => Just(16_777_216.0f32),
        ])) {
            let found = best(&scores, u16::MAX);
            prop_assert!(patterns().contains(&found));
            let top = patterns().iter().map(|m| sum_as_searched(&scores, *m)).fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(sum_as_searched(&scores, found), top);
        }

        #[test]
        fn huge_scores_are_told_apart_and_infinities_come_first(
            scores in proptest::array::uniform16(prop_oneof![
                2 => Just(f32::MAX), 2 => 0f32..f32::MAX, 2 => 0f32..1.0, 1 => Just(f32::INFINITY),
            ]),
            rows in 1usize..=4,
            cols in 1usize..=4,
        ) {
            let inside = (0..16).filter(|i| i / 4 < rows && i % 4 < cols).fold(0u16, |b, i| b | 1 << i);
            let infinities = |mask: u16| (0..16).filter(|i| mask >> i & 1 == 1 && scores[*i] == f32::INFINITY).count();
            let finite = scores.map(|s| if s == f32::INFINITY { 0.0 } else { s });
            for inside in [u16::MAX, inside] {
                let found = best(&scores, inside);
                prop_assert_eq!(found & !inside, 0);
                let most = patterns().iter().map(|m| infinities(m & inside)).max().unwrap();
                prop_assert!(infinities(found) >= most);
                let equal = patterns().into_iter().filter(|m| infinities(m & inside) == infinities(found));
                let top = equal.map(|m| mass(&finite, m & inside)).fold(0.0, f64::max);
                // Beside infinities, which stand for f32::MAX / 16, finite scores are rounded to its unit in the last
                // place.
                let slack = if infinities(found) > 0 { 256.0 * 8.0 * f64::from(f32::MAX) * f64::from(f32::EPSILON) } else { 1e-6 * top };
                prop_assert!(mass(&finite, found) >= top - slack, "{} instead of {top}", mass(&finite, found));
            }
        }
    }

    #[test]
    fn a_finite_score_never_drives_out_an_infinite_one() {
        // Both in one column; the first pattern with an infinite sum would have kept one only.
        let mut scores = [1.0f32; 16];
        scores[5] = f32::INFINITY;
        scores[9] = f32::INFINITY;
        let found = best(&scores, u16::MAX);
        assert!(found >> 5 & 1 == 1 && found >> 9 & 1 == 1, "{found:016b}");
        // Eight of f32::MAX on the last pattern, whose sum overflows.
        let last = *patterns().last().unwrap();
        let scores = std::array::from_fn(|i| if last >> i & 1 == 1 { f32::MAX } else { f32::MAX / 2.0 });
        assert_eq!(best(&scores, u16::MAX), last);
    }
}
