//! Orders of a layer's input features in which a pattern costs less.
//!
//! A pattern keeps `N` of every `M` consecutive elements of a row. Where a row's important elements are neighbours, it
//! prunes some of them and keeps unimportant ones elsewhere. In another order of the columns they fall into different
//! groups. The order costs nothing where the layer before can be stored with its rows in the same order: the model
//! computes what it did.
//!
//! The score of an element is what the layer's error becomes when it alone is pruned and the others make up for it,
//! `w² / [H⁻¹]_jj`. Columns are sorted by the sum of their elements' scores and dealt to the groups, so that each group
//! gets important and unimportant ones. Then groups in pairs exchange two columns, the two that make the sum of the
//! kept scores largest, as long as that sum grows (as in Pool and Yu, "Channel Permutations for N:M Sparsity", NeurIPS
//! 2021, with these scores in place of magnitudes).

use rayon::prelude::*;

use super::{
    Backend, Cpu,
    normal::{Damped, finite_weight},
};
use crate::{Error, MatrixRef, Pattern, Result, calibration::Hessian};

/// Settings of [`permutation`](permutation()).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Permutation {
    /// The pattern along rows.
    pub pattern: Pattern,
    /// What is added to the Hessian's diagonal, as a share of its mean.
    pub damping: f64,
    /// The most rounds of exchanges: in each, every group is paired with another.
    pub rounds: usize,
}

impl Permutation {
    /// Damping 0.01, at most a hundred rounds.
    pub fn new(pattern: Pattern) -> Self {
        Self { pattern, damping: 0.01, rounds: 100 }
    }
}

/// Rows whose scores decide; of a taller weight they are spread over it.
const ROWS: usize = 1024;

/// The share by which a round must raise what is kept for another to follow.
const LEAST: f64 = 1e-5;

/// Returns the order of a weight's columns: `order[j]` is the column that comes to place `j`.
///
/// Columns keep to their sets: each of `sets` are runs of `len` columns, by their first ones, that must have the same
/// order within themselves, as the heads that read the same values have. Columns outside of all sets stay where they
/// are. Ties go to the lower column; the result is the same with any number of threads.
///
/// # Errors
/// [`Error::Setting`] for sets that do not fit, and for a length that is no multiple of the pattern's group;
/// [`Error::Length`] where the Hessian is of another number of features; [`Error::NotANumber`] or [`Error::Infinite`]
/// with the place; [`Error::NotPositiveDefinite`], [`Error::NoTokens`].
///
/// ```
/// use twofour::{MatrixRef, Pattern, calibration::Hessian, solve::{Permutation, permutation}};
/// // The four large elements are neighbours: two of them would go.
/// let w = [9.0f32, 8.0, 7.0, 6.0, 0.1, 0.2, 0.3, 0.4];
/// let mut hessian = Hessian::new(8)?;
/// (0..8).try_for_each(|j| hessian.add(&std::array::from_fn::<f32, 8, _>(|i| if i == j { 1.0 } else { 0.0 })))?;
/// let settings = Permutation::new(Pattern::TWO_FOUR);
/// let order = permutation(MatrixRef::new(1, 8, &w)?, &hessian, &[vec![0]], 8, &settings)?;
/// assert_eq!(order[..4].iter().filter(|column| **column < 4).count(), 2);
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn permutation(
    weight: MatrixRef<'_, f32>,
    hessian: &Hessian,
    sets: &[Vec<usize>],
    len: usize,
    settings: &Permutation,
) -> Result<Vec<usize>> {
    permutation_on(&Cpu, weight, hessian, sets, len, settings)
}

/// [`permutation`], with the inverse computed on a backend.
///
/// # Errors
/// Those of [`permutation`] and of the backend.
pub fn permutation_on(
    backend: &dyn Backend,
    weight: MatrixRef<'_, f32>,
    hessian: &Hessian,
    sets: &[Vec<usize>],
    len: usize,
    settings: &Permutation,
) -> Result<Vec<usize>> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let dense = finite_weight(weight, hessian)?;
    let pattern = settings.pattern;
    if len == 0 || !len.is_multiple_of(pattern.m()) {
        let (what, expected) = ("columns that are ordered", "a multiple of the pattern's group");
        return Err(Error::Setting { what, value: len as f64, expected });
    }
    let mut is_taken = vec![false; cols];
    for &first in sets.iter().flatten() {
        let run = first.checked_add(len).and_then(|end| is_taken.get_mut(first..end));
        match run.filter(|run| run.iter().all(|taken| !taken)) {
            Some(run) => run.fill(true),
            None => {
                let (what, expected) = ("the first column of a run", "such that runs fit and do not overlap");
                return Err(Error::Setting { what, value: first as f64, expected });
            }
        }
    }
    let damping = settings.damping;
    let damped = backend.upload(Damped::new(hessian, damping)?.into_values())?;
    let failed = |feature| Error::NotPositiveDefinite { feature, damping };
    let inverse = backend.download(backend.inverse(&damped, cols, 0.0)?.map_err(failed)?)?;
    let step = rows.div_ceil(ROWS).max(1);
    let mut order: Vec<usize> = (0..cols).collect();
    for set in sets {
        let scores = |column: usize| -> Vec<f32> {
            let of_run = |first: &usize| {
                let column = first + column;
                let inverse = inverse[column * cols + column];
                dense.iter().skip(column).step_by(cols * step).map(move |w| w * w / inverse)
            };
            set.iter().flat_map(of_run).collect()
        };
        let scores: Vec<Vec<f32>> = (0..len).into_par_iter().map(scores).collect();
        let own = Groups::dealt(pattern, &scores).improved(settings.rounds);
        for first in set {
            order[*first..*first + len].iter_mut().zip(&own).for_each(|(place, column)| *place = first + column);
        }
    }
    Ok(order)
}

/// Columns in groups.
struct Groups<'a> {
    pattern: Pattern,
    /// The scores of each column's elements.
    scores: &'a [Vec<f32>],
    groups: Vec<Group>,
}

#[derive(Debug, Clone)]
struct Group {
    columns: Vec<usize>,
    /// The sum of the scores that the pattern keeps.
    kept: f64,
}

impl<'a> Groups<'a> {
    fn dealt(pattern: Pattern, scores: &'a [Vec<f32>]) -> Self {
        let sums: Vec<f64> = scores.iter().map(|scores| scores.iter().map(|s| f64::from(*s)).sum()).collect();
        let mut sorted: Vec<usize> = (0..scores.len()).collect();
        sorted.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]).then(a.cmp(b)));
        let count = scores.len() / pattern.m();
        let group = |group: usize| {
            let columns: Vec<usize> = sorted.iter().skip(group).step_by(count).copied().collect();
            Group { kept: kept(pattern, scores, &columns), columns }
        };
        Groups { pattern, scores, groups: (0..count).into_par_iter().map(group).collect() }
    }

    /// The order after exchanges between pairs of groups.
    fn improved(mut self, rounds: usize) -> Vec<usize> {
        let mut state = 1u64;
        for _ in 0..rounds {
            let before: f64 = self.groups.iter().map(|group| group.kept).sum();
            shuffle(&mut self.groups, &mut state);
            let (pattern, scores) = (self.pattern, self.scores);
            self.groups.par_chunks_exact_mut(2).for_each(|pair| {
                if let [a, b] = pair {
                    exchange(pattern, scores, a, b);
                }
            });
            let after: f64 = self.groups.iter().map(|group| group.kept).sum();
            if after <= before * (1.0 + LEAST) {
                break;
            }
        }
        self.groups.into_iter().flat_map(|group| group.columns).collect()
    }
}

/// Exchanges the two columns of two groups that make the sum of what both keep largest, if any do.
fn exchange(pattern: Pattern, scores: &[Vec<f32>], a: &mut Group, b: &mut Group) {
    let (left, right) = (Exchanges::of(pattern, scores, a, b), Exchanges::of(pattern, scores, b, a));
    let mut best = (a.kept + b.kept, None);
    for i in 0..a.columns.len() {
        for j in 0..b.columns.len() {
            let kept = [left.kept(i, j), right.kept(j, i)];
            if kept[0] + kept[1] > best.0 * (1.0 + 1e-9) {
                best = (kept[0] + kept[1], Some((i, j, kept)));
            }
        }
    }
    if let (_, Some((i, j, kept))) = best {
        std::mem::swap(&mut a.columns[i], &mut b.columns[j]);
        (a.kept, b.kept) = (kept[0], kept[1]);
    }
}

/// What a group keeps with a column of another in the place of one of its own: `[own, other]`.
struct Exchanges {
    others: usize,
    kept: Vec<f64>,
}

impl Exchanges {
    fn of(pattern: Pattern, scores: &[Vec<f32>], own: &Group, other: &Group) -> Self {
        let (own, other) = (&own.columns, &other.columns);
        let kept = if pattern == Pattern::TWO_FOUR {
            each(pattern, scores, own, other)
        } else {
            all(pattern, scores, own, other)
        };
        Exchanges { others: other.len(), kept }
    }

    fn kept(&self, own: usize, other: usize) -> f64 {
        self.kept[own * self.others + other]
    }
}

/// Each exchange by itself.
fn each(pattern: Pattern, scores: &[Vec<f32>], own: &[usize], other: &[usize]) -> Vec<f64> {
    let mut columns = own.to_vec();
    let mut sums = Vec::with_capacity(own.len() * other.len());
    for (place, column) in own.iter().enumerate() {
        for other in other {
            columns[place] = *other;
            sums.push(kept(pattern, scores, &columns));
        }
        columns[place] = *column;
    }
    sums
}

/// All exchanges in one pass over the rows. Without one of its elements a group of a row keeps a sum, of which an
/// element that is larger than the last kept one takes that one's place.
fn all(pattern: Pattern, scores: &[Vec<f32>], own: &[usize], other: &[usize]) -> Vec<f64> {
    let rows = own.first().map_or(0, |first| scores[*first].len());
    let mut sums = vec![0f64; own.len() * other.len()];
    let (mut values, mut sorted, mut others) = (vec![0f64; own.len()], vec![0f64; own.len()], vec![0f64; other.len()]);
    let of_row = |row: usize, columns: &[usize], values: &mut [f64]| {
        values.iter_mut().zip(columns).for_each(|(value, column)| *value = f64::from(scores[*column][row]));
    };
    for row in 0..rows {
        of_row(row, own, &mut values);
        of_row(row, other, &mut others);
        sorted.copy_from_slice(&values);
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        let (kept, pruned) = sorted.split_at(pattern.n());
        let total: f64 = kept.iter().sum();
        let last = kept.last().copied().unwrap_or(0.0);
        let next = pruned.first().copied().unwrap_or(0.0);
        for (value, sums) in values.iter().zip(sums.chunks_exact_mut(other.len())) {
            let (rest, least) = if *value >= last { (total - value + next, next) } else { (total, last) };
            sums.iter_mut().zip(&others).for_each(|(sum, other)| *sum += rest + (other - least).max(0.0));
        }
    }
    sums
}

/// The sum over rows of the `N` largest scores of these `M` columns.
fn kept(pattern: Pattern, scores: &[Vec<f32>], columns: &[usize]) -> f64 {
    if let (Pattern::TWO_FOUR, &[a, b, c, d]) = (pattern, columns) {
        let pairs = scores[a].iter().zip(&scores[b]).zip(scores[c].iter().zip(&scores[d]));
        // The larger of each pair and the smaller of each: the second largest is among the inner two.
        return pairs
            .map(|((a, b), (c, d))| {
                let (high, low) = ([a.max(*b), c.max(*d)], [a.min(*b), c.min(*d)]);
                high[0].max(high[1]) + high[0].min(high[1]).max(low[0].max(low[1]))
            })
            .map(f64::from)
            .sum();
    }
    let rows = columns.first().map_or(0, |first| scores[*first].len());
    let of_row = |row: usize| {
        let mut own: Vec<f32> = columns.iter().map(|column| scores[*column][row]).collect();
        own.sort_by(|a, b| b.total_cmp(a));
        own.iter().take(pattern.n()).map(|score| f64::from(*score)).sum::<f64>()
    };
    (0..rows).map(of_row).sum()
}

/// Puts groups in a random order that depends on the state alone.
fn shuffle(groups: &mut [Group], state: &mut u64) {
    for last in (1..groups.len()).rev() {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        groups.swap(last, (*state >> 33) as usize % (last + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::solve::testing::{correlated, random};

    /// Elements that are large in some columns, so that neighbours are alike.
    fn uneven(rows: usize, cols: usize) -> Vec<f32> {
        let scale = |i: usize| if (i % cols / 4).is_multiple_of(2) { 1.0 } else { 0.05 + (i % cols) as f32 * 0.01 };
        random(rows * cols, 40).into_iter().enumerate().map(|(i, w)| w * scale(i)).collect()
    }

    /// The sum of the scores that the pattern keeps in this order.
    fn kept_of(pattern: Pattern, weight: &[f32], hessian: &Hessian, order: &[usize]) -> f64 {
        let inverse = hessian.inverse_diagonal(0.01).unwrap();
        let score = |row: &[f32], j: usize| f64::from(row[j] * row[j]) / f64::from(inverse[j]);
        let of_group = |row: &[f32], group: &[usize]| {
            let mut scores: Vec<f64> = group.iter().map(|j| score(row, *j)).collect();
            scores.sort_by(|a, b| b.total_cmp(a));
            scores[..pattern.n()].iter().sum::<f64>()
        };
        weight.chunks(order.len()).flat_map(|row| order.chunks(pattern.m()).map(move |g| of_group(row, g))).sum()
    }

    #[test]
    fn each_step_keeps_more_and_no_exchange_of_two_columns_would_keep_much_more() {
        for (text, rows) in [("2:4", 6), ("4:8", 3), ("1:4", 5), ("8:16", 2)] {
            let (pattern, cols): (Pattern, usize) = (text.parse().unwrap(), 48);
            let (hessian, w) = (correlated(cols, 300), uneven(rows, cols));
            let matrix = MatrixRef::new(rows, cols, &w).unwrap();
            let of = |rounds| {
                let settings = Permutation { rounds, ..Permutation::new(pattern) };
                permutation(matrix, &hessian, &[vec![0]], cols, &settings).unwrap()
            };
            let kept = |order: &[usize]| kept_of(pattern, &w, &hessian, order);
            let (plain, dealt, best) = ((0..cols).collect::<Vec<_>>(), of(0), of(1000));
            assert!(kept(&plain) < kept(&dealt) && kept(&dealt) < kept(&best), "{pattern}");
            let mut sorted = best.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, plain);
            let all = kept(&best);
            for (i, j) in (0..cols).flat_map(|i| (0..i).map(move |j| (i, j))) {
                let mut other = best.clone();
                other.swap(i, j);
                assert!(kept(&other) <= all * 1.02, "{pattern}: {i} {j}: {} {all}", kept(&other));
            }
        }
    }

    #[test]
    fn what_exchanges_keep_is_the_same_all_at_once_and_one_by_one() {
        for (text, ties) in [("1:4", false), ("4:8", true), ("8:16", false), ("8:16", true), ("8:8", false)] {
            let pattern: Pattern = text.parse().unwrap();
            let m = pattern.m();
            let score = |w: f32| if ties { (w * 3.0).round().abs() } else { w.abs() };
            let w = random(2 * m * 9, 6);
            let scores: Vec<Vec<f32>> = w.chunks(9).map(|rows| rows.iter().map(|w| score(*w)).collect()).collect();
            let (own, other): (Vec<usize>, Vec<usize>) = ((0..m).collect(), (m..2 * m).collect());
            let (found, expected) = (all(pattern, &scores, &own, &other), each(pattern, &scores, &own, &other));
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-6 * b;
            assert!(found.len() == m * m && found.iter().zip(&expected).all(near), "{pattern}");
        }
    }

    #[test]
    fn runs_of_a_set_have_one_order_and_columns_outside_of_sets_stay() {
        let (rows, cols, len) = (5, 40, 8);
        let (hessian, w) = (correlated(cols, 300), uneven(rows, cols));
        let matrix = MatrixRef::new(rows, cols, &w).unwrap();
        let settings = Permutation::new(Pattern::TWO_FOUR);
        let sets = [vec![0, 16], vec![24]];
        let order = permutation(matrix, &hessian, &sets, len, &settings).unwrap();
        let own = |first: usize| order[first..first + len].iter().map(|column| column - first).collect::<Vec<_>>();
        assert_eq!(own(0), own(16));
        for first in [0, 24] {
            let mut sorted = own(first);
            sorted.sort_unstable();
            assert_eq!(sorted, (0..len).collect::<Vec<_>>());
        }
        for outside in [8..16, 32..40] {
            assert_eq!(order[outside.clone()], outside.collect::<Vec<_>>());
        }
        for (sets, len) in [(vec![vec![0, 4]], 8), (vec![vec![36]], 8), (vec![vec![0]], 6), (vec![vec![0]], 0)] {
            assert!(permutation(matrix, &hessian, &sets, len, &settings).is_err(), "{sets:?} {len}");
        }
        assert!(permutation(matrix, &correlated(8, 50), &[vec![0]], 8, &settings).is_err());
        let bad = [f32::NAN; 40];
        let bad = MatrixRef::new(1, cols, &bad).unwrap();
        assert!(matches!(permutation(bad, &hessian, &sets, len, &settings), Err(Error::NotANumber { .. })));
        assert!(permutation(MatrixRef::new(0, cols, &[]).unwrap(), &hessian, &sets, len, &settings).is_ok());
    }
}
