//! Low-rank factors of a matrix, and a low-rank part beside a pruned weight.
//!
//! `S·Q`, with `S: [rows, rank]` and `Q: [rank, cols]`, stands for a matrix `D` in `Dx ≈ S(Qx)`. The best factors for a
//! layer's inputs `X` make `‖(D - S·Q)·X‖` smallest. With `H = X·Xᵀ` and the eigenvectors `U` of `D H Dᵀ` with the
//! `rank` largest eigenvalues they are
//!
//! ```text
//! S = U        Q = Uᵀ·D
//! ```
//!
//! which is the singular value decomposition of `D·H^½` without the root of `H` and without its inverse. The largest
//! eigenvectors come from subspace iteration: products with `D`, `H` and `Dᵀ`, and an orthonormal basis after each,
//! until the basis holds no more of the matrix. Without inputs `H` is the identity; where only the norms of the inputs
//! are known it is their squares on the diagonal.
//!
//! Beside a pruned weight `Ŵ` the factors stand for what pruning took away, `D = W - Ŵ`:
//!
//! - EoRA (Liu et al., "EoRA: Fine-tuning-free Compensation for Compressed LLM with Eigenspace Low-Rank Approximation",
//!   2024) has the whole `H`, and leaves `Ŵ` as it is;
//! - SLiM (Mozaffari et al., "SLiM: One-shot Quantization and Sparsity with Low-rank Approximation for LLM Weight
//!   Compression", ICML 2025) has the norms of the inputs, and makes the kept weights those of `W - S·Q`.

use std::{fmt, str::FromStr};

use rayon::prelude::*;

use super::{
    Pruned, Refit, Solved,
    method::solved,
    normal::{Damped, product},
    refit,
};
use crate::{
    Error, MatrixRef, Result,
    calibration::{Statistic, StatisticKind},
    linear_algebra::{
        eigen,
        gemm::{Block, Operand, Threads, multiply},
    },
};

/// Directions beyond the rank: with them the last ones of the rank converge as fast as the first.
const MORE: usize = 8;

/// The most products with the matrix, and the growth of what the basis holds below which there is none.
const STEPS: usize = 24;
const LEAST: f64 = 1e-5;

/// Two matrices whose product has a low rank.
#[derive(Debug, Clone, PartialEq)]
pub struct LowRank {
    rows: usize,
    cols: usize,
    rank: usize,
    left: Vec<f32>,
    right: Vec<f32>,
}

impl LowRank {
    /// The factors `left: [rows, rank]` and `right: [rank, cols]`, row-major.
    ///
    /// # Errors
    /// [`Error::Length`] for factors of other lengths.
    pub fn new(rows: usize, cols: usize, rank: usize, left: Vec<f32>, right: Vec<f32>) -> Result<Self> {
        for (what, factor, size) in [("the left factor", &left, rows), ("the right factor", &right, cols)] {
            if Some(factor.len()) != size.checked_mul(rank) {
                return Err(Error::Length { what, expected: size.saturating_mul(rank), found: factor.len() });
            }
        }
        Ok(LowRank { rows, cols, rank, left, right })
    }

    /// The rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// `S: [rows, rank]`, row-major.
    pub fn left(&self) -> &[f32] {
        &self.left
    }

    /// `Q: [rank, cols]`, row-major.
    pub fn right(&self) -> &[f32] {
        &self.right
    }

    /// `S·Q`, row-major.
    pub fn product(&self) -> Vec<f32> {
        let mut out = vec![0f32; self.rows * self.cols];
        let block = |rows, cols| Block { row: 0, col: 0, rows, cols };
        multiply(
            (&mut out, self.cols, block(self.rows, self.cols)),
            0.0,
            1.0,
            Operand::new(&self.left, self.rank, block(self.rows, self.rank)),
            Operand::new(&self.right, self.cols, block(self.rank, self.cols)),
            Threads::All,
        );
        out
    }
}

/// A rank, or the budget that gives it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rank {
    /// So many directions for each weight.
    Directions(usize),
    /// So many that the factors have this share of the weight's elements.
    Share(f64),
}

impl Rank {
    /// The rank for a weight `[rows, cols]`: at least 1, and at most its smaller dimension.
    pub fn of(self, rows: usize, cols: usize) -> usize {
        let rank = match self {
            Rank::Directions(rank) => rank,
            Rank::Share(share) => (share * rows as f64 * cols as f64 / (rows + cols).max(1) as f64) as usize,
        };
        rank.clamp(1, rows.min(cols).max(1))
    }
}

impl FromStr for Rank {
    type Err = Error;

    /// `64`, or `5%`.
    fn from_str(text: &str) -> Result<Self> {
        let fault = |value| Error::Setting { what: "a rank", value, expected: "a number from 1, or a share above 0%" };
        match text.strip_suffix('%') {
            Some(share) => match share.trim().parse::<f64>() {
                Ok(share) if share > 0.0 && share <= 100.0 => Ok(Rank::Share(share / 100.0)),
                share => Err(fault(share.unwrap_or(f64::NAN))),
            },
            None => match text.parse::<usize>() {
                Ok(rank) if rank > 0 => Ok(Rank::Directions(rank)),
                _ => Err(fault(text.parse().unwrap_or(f64::NAN))),
            },
        }
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rank::Directions(rank) => write!(f, "{rank}"),
            Rank::Share(share) => write!(f, "{}%", share * 100.0),
        }
    }
}

/// Returns the factors of that rank, at most the smaller dimension, that stand for a matrix `[rows, cols]` with the
/// least error on inputs; without any, in the Frobenius norm.
///
/// The result is the same with any number of threads.
///
/// # Errors
/// [`Error::Setting`] for rank 0; [`Error::NotANumber`] or [`Error::Infinite`] with the place; [`Error::Length`] where
/// the statistic is of another number of features; [`Error::NoTokens`].
///
/// ```
/// use twofour::{MatrixRef, solve::low_rank};
/// // Every row is a multiple of one.
/// let w = [1.0f32, 2.0, 3.0, -2.0, -4.0, -6.0];
/// let factors = low_rank(MatrixRef::new(2, 3, &w)?, None, 1)?;
/// assert!(factors.product().iter().zip(&w).all(|(found, w)| (found - w).abs() < 1e-5));
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn low_rank(matrix: MatrixRef<'_, f32>, inputs: Option<&Statistic>, rank: usize) -> Result<LowRank> {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    matrix.expect_finite()?;
    if rank == 0 {
        return Err(Error::Setting { what: "the rank", value: 0.0, expected: "at least 1" });
    }
    let metric = Metric::new(inputs, cols)?;
    let rank = rank.min(rows).min(cols);
    let wide = (rank + MORE).min(rows).min(cols);
    let mut basis: Vec<f32> = (0..wide * rows)
        .map(|place| crate::random::four(0, (place / rows) as u32, (place % rows) as u32)[0] - 0.5)
        .collect();
    orthonormalize(&mut basis, rows);
    let (mut inside, mut weighted) = (vec![0f32; wide * cols], vec![0f32; wide * cols]);
    let mut image = vec![0f32; wide * rows];
    let whole = |rows, cols| Block { row: 0, col: 0, rows, cols };
    let dense = || Operand::new(matrix.data(), cols, whole(rows, cols));
    let mut held = 0.0;
    for step in 0..STEPS {
        if step > 0 {
            std::mem::swap(&mut basis, &mut image);
            orthonormalize(&mut basis, rows);
        }
        // One row for each direction: uᵀD, uᵀD H, uᵀD H Dᵀ.
        let out = (inside.as_mut_slice(), cols, whole(wide, cols));
        multiply(out, 0.0, 1.0, Operand::new(&basis, rows, whole(wide, rows)), dense(), Threads::All);
        metric.apply(&inside, &mut weighted, cols);
        let out = (image.as_mut_slice(), rows, whole(wide, rows));
        let left = Operand::new(&weighted, cols, whole(wide, cols));
        multiply(out, 0.0, 1.0, left, dense().transposed(), Threads::All);
        let now: f64 = basis.iter().zip(&image).map(|(u, y)| f64::from(*u) * f64::from(*y)).sum();
        if now <= held * (1.0 + LEAST) {
            break;
        }
        held = now;
    }
    // Within the basis, the largest directions.
    let dot = |i: usize, j: usize| -> f64 {
        let (a, b) = (&inside[i * cols..(i + 1) * cols], &weighted[j * cols..(j + 1) * cols]);
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let gram: Vec<f64> = (0..wide * wide).into_par_iter().map(|place| dot(place / wide, place % wide)).collect();
    let symmetric = (0..wide * wide).map(|place| 0.5 * (gram[place] + gram[place % wide * wide + place / wide]));
    let (_, vectors) = eigen::symmetric(symmetric.collect(), wide);
    let combined = |of: &[f32], size: usize, direction: usize| -> Vec<f32> {
        let mut sum = vec![0f64; size];
        for (weight, row) in vectors[direction * wide..(direction + 1) * wide].iter().zip(of.chunks(size.max(1))) {
            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * f64::from(*value));
        }
        sum.into_iter().map(|value| value as f32).collect()
    };
    let (mut left, mut right) = (vec![0f32; rows * rank], vec![]);
    for direction in 0..rank {
        let (u, mut q) = (combined(&basis, rows, direction), combined(&inside, cols, direction));
        // Both factors of a direction have the same norm, as in EoRA.
        let norm = q.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        let scale = norm.sqrt() as f32;
        if scale > 0.0 {
            q.iter_mut().for_each(|value| *value /= scale);
            left.iter_mut().skip(direction).step_by(rank).zip(&u).for_each(|(place, value)| *place = value * scale);
        }
        right.extend(q);
    }
    LowRank::new(rows, cols, rank, left, right)
}

/// How an error is measured: `H`.
enum Metric {
    Plain,
    Diagonal(Vec<f32>),
    Whole(Vec<f32>),
}

impl Metric {
    fn new(inputs: Option<&Statistic>, cols: usize) -> Result<Self> {
        let of = |found: usize| match found == cols {
            true => Ok(()),
            false => Err(Error::Length { what: "input features of the statistic", expected: cols, found }),
        };
        match inputs {
            None => Ok(Metric::Plain),
            Some(Statistic::Norms(norms)) => {
                of(norms.features())?;
                if norms.tokens() == 0 {
                    return Err(Error::NoTokens { what: "norms of input features" });
                }
                Ok(Metric::Diagonal(norms.sums_of_squares().iter().map(|sum| *sum as f32).collect()))
            }
            Some(Statistic::Hessian(hessian)) => {
                of(hessian.features())?;
                let mut values = Damped::new(hessian, 0.0)?.into_values();
                // Without what stands for features that had no inputs.
                values.iter_mut().step_by(cols + 1).zip(hessian.diagonal()).for_each(|(value, d)| *value = d);
                Ok(Metric::Whole(values))
            }
        }
    }

    /// `x · H` for rows `x: [_, cols]`.
    fn apply(&self, x: &[f32], out: &mut [f32], cols: usize) {
        match self {
            Metric::Plain => out.copy_from_slice(x),
            Metric::Diagonal(diagonal) => {
                for (out, x) in out.chunks_mut(cols.max(1)).zip(x.chunks(cols.max(1))) {
                    out.iter_mut().zip(x.iter().zip(diagonal)).for_each(|(out, (x, d))| *out = x * d);
                }
            }
            Metric::Whole(values) => product(x, values, cols, out),
        }
    }
}

/// Makes rows orthonormal; one that lies in the span of those before it becomes zero.
fn orthonormalize(rows: &mut [f32], cols: usize) {
    let mut exact: Vec<f64> = rows.iter().map(|value| f64::from(*value)).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    // Twice is enough (Giraud et al., "The loss of orthogonality in the Gram-Schmidt process", 2005).
    for _ in 0..2 {
        let norms: Vec<f64> = exact.chunks(cols.max(1)).map(|row| dot(row, row).sqrt()).collect();
        for (index, norm) in norms.iter().enumerate() {
            let (before, behind) = exact.split_at_mut((index + 1) * cols);
            let row = &mut before[index * cols..];
            let length = dot(row, row).sqrt();
            if length > norm * 1e-7 {
                row.iter_mut().for_each(|value| *value /= length);
            } else {
                row.fill(0.0);
                continue;
            }
            let row = &*row;
            behind.par_chunks_mut(cols.max(1)).for_each(|other| {
                let along = dot(other, row);
                other.iter_mut().zip(row).for_each(|(other, value)| *other -= along * value);
            });
        }
    }
    rows.iter_mut().zip(exact).for_each(|(value, exact)| *value = exact as f32);
}

/// How a low-rank part is found beside a pruned weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LowRankForm {
    /// EoRA: the best factors for the layer's inputs.
    Eora,
    /// SLiM: the best ones for the norms of the inputs, and kept weights that make up for what they leave.
    Slim,
}

/// A low-rank part beside pruned weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LowRankPart {
    /// How it is found.
    pub form: LowRankForm,
    /// Its rank.
    pub rank: Rank,
    /// Of [`LowRankForm::Slim`] the steps of [`refit`](super::refit()) for the kept weights, where a Hessian was
    /// gathered.
    pub refit: usize,
}

impl LowRankPart {
    /// What it requires of the layer's inputs.
    pub fn requires(&self) -> StatisticKind {
        match self.form {
            LowRankForm::Eora => StatisticKind::Hessian,
            LowRankForm::Slim if self.refit > 0 => StatisticKind::Hessian,
            LowRankForm::Slim => StatisticKind::Norms,
        }
    }

    /// Returns the factors beside what a weight `[rows, cols]` was pruned to, and the pruned weight as it is to be with
    /// them.
    ///
    /// # Errors
    /// Those of [`low_rank`] and of [`refit`](super::refit()); [`Error::Shape`] for a mask of another shape;
    /// [`Error::Setting`] for SLiM where kept weights were rounded, which it would change.
    pub fn beside(&self, weight: MatrixRef<'_, f32>, pruned: Pruned, inputs: &Statistic) -> Result<(Pruned, LowRank)> {
        let (rows, cols) = (weight.rows(), weight.cols());
        let rank = self.rank.of(rows, cols);
        pruned.mask().expect_shape("mask and weight", rows, cols)?;
        let kept = match &pruned {
            Pruned::Mask(mask) => mask.apply(weight)?,
            Pruned::Solved(solved) => solved.weight.clone(),
        };
        let lost = difference(weight.data(), &kept);
        let lost = MatrixRef::new(rows, cols, &lost)?;
        if self.form == LowRankForm::Eora {
            return Ok((pruned, low_rank(lost, Some(inputs), rank)?));
        }
        if let Pruned::Solved(Solved { integers: Some(_), .. }) = &pruned {
            let (what, expected) = ("the bits of kept weights under SLiM", "those of a float: they are found anew");
            return Err(Error::Setting { what, value: f64::NAN, expected });
        }
        let norms = Statistic::Norms(inputs.norms().into_owned());
        let factors = low_rank(lost, Some(&norms), rank)?;
        let rest = difference(weight.data(), &factors.product());
        let rest = MatrixRef::new(rows, cols, &rest)?;
        let mask = pruned.mask().clone();
        let found = match inputs.hessian() {
            Some(hessian) => {
                let settings = Refit { steps: self.refit, ..Refit::default() };
                let adjusted = refit(rest, &mask, None, hessian, &settings)?;
                solved(&super::Cpu, rest, adjusted, mask, hessian)?
            }
            None => {
                let (weight, squared_error) = (mask.apply(rest)?, f64::NAN);
                Solved { weight, mask, integers: None, scales: None, squared_error }
            }
        };
        Ok((Pruned::Solved(found), factors))
    }
}

fn difference(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a - b).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Pattern,
        calibration::{Hessian, InputNorms},
        select,
        solve::testing::{correlated, error_of, random},
    };

    /// What the best factors of each rank leave, `‖(D - SQ)·X‖²`, from all eigenvalues of `D H Dᵀ`.
    fn left_by_rank(matrix: &[f32], rows: usize, hessian: &Hessian) -> Vec<f64> {
        let cols = hessian.features();
        let h = |i: usize, j: usize| f64::from(hessian.lower()[i.max(j) * cols + i.min(j)]);
        let d = |i: usize, j: usize| f64::from(matrix[i * cols + j]);
        let dh: Vec<f64> =
            (0..rows * cols).map(|place| (0..cols).map(|k| d(place / cols, k) * h(k, place % cols)).sum()).collect();
        let g = |i: usize, j: usize| (0..cols).map(|k| dh[i * cols + k] * d(j, k)).sum::<f64>();
        let (values, _) = eigen::symmetric((0..rows * rows).map(|place| g(place / rows, place % rows)).collect(), rows);
        (0..=rows).map(|rank| values[rank..].iter().sum()).collect()
    }

    #[test]
    fn factors_leave_what_the_smallest_eigenvalues_have() {
        for (rows, cols) in [(20, 32), (32, 12), (5, 8)] {
            let (matrix, hessian) = (random(rows * cols, 11), correlated(cols, 64));
            let left = left_by_rank(&matrix, rows, &hessian);
            let view = MatrixRef::new(rows, cols, &matrix).unwrap();
            for rank in [1, 2, 4, rows.min(cols) - 1, rows.min(cols), 100] {
                let factors = low_rank(view, Some(&Statistic::Hessian(hessian.clone())), rank).unwrap();
                assert_eq!(factors.rank(), rank.min(rows).min(cols));
                let found = error_of(&hessian, &matrix, &factors.product());
                let expected = left[factors.rank()].max(0.0);
                assert!(found <= expected * 1.01 + left[0] * 1e-5, "{rows}x{cols} {rank}: {found}, best {expected}");
                assert!(found >= expected * 0.99 - left[0] * 1e-5, "{rows}x{cols} {rank}: {found}, best {expected}");
            }
        }
    }

    #[test]
    fn inputs_matter_and_matrices_of_low_rank_are_exact() {
        let (rows, cols) = (24, 40);
        let (matrix, hessian) = (random(rows * cols, 5), correlated(cols, 100));
        let view = MatrixRef::new(rows, cols, &matrix).unwrap();
        let norms = Statistic::Norms(InputNorms::of_hessian(&hessian));
        let whole = Statistic::Hessian(hessian.clone());
        let [plain, by_norms, best] = [None, Some(&norms), Some(&whole)]
            .map(|inputs| error_of(&hessian, &matrix, &low_rank(view, inputs, 6).unwrap().product()));
        assert!(best < by_norms && by_norms < plain, "{best} {by_norms} {plain}");
        let product = low_rank(view, None, 3).unwrap().product();
        let again = low_rank(MatrixRef::new(rows, cols, &product).unwrap(), Some(&whole), 3).unwrap().product();
        assert!(product.iter().zip(&again).all(|(a, b)| (a - b).abs() < 1e-4));
        let zeros = vec![0f32; rows * cols];
        let nothing = low_rank(MatrixRef::new(rows, cols, &zeros).unwrap(), Some(&whole), 3).unwrap();
        assert_eq!(nothing.product(), zeros);
        assert!(low_rank(view, None, 0).is_err());
        assert!(low_rank(view, Some(&Statistic::Hessian(correlated(8, 9))), 1).is_err());
        assert!(low_rank(view, Some(&Statistic::Norms(InputNorms::new(cols))), 1).is_err());
        let bad = vec![f32::NAN; 4];
        assert!(low_rank(MatrixRef::new(2, 2, &bad).unwrap(), None, 1).is_err());
    }

    #[test]
    fn a_part_beside_a_pruned_weight_lowers_its_error_and_leaves_its_mask() {
        let (rows, cols) = (16, 32);
        let (matrix, hessian) = (random(rows * cols, 9), correlated(cols, 90));
        let view = MatrixRef::new(rows, cols, &matrix).unwrap();
        let mask = select::magnitude(view, Pattern::TWO_FOUR, crate::Axis::Row).unwrap();
        let inputs = Statistic::Hessian(hessian.clone());
        let pruned = error_of(&hessian, &matrix, &mask.apply(view).unwrap());
        let with = |form, rank, refit| {
            let part = LowRankPart { form, rank, refit };
            let (found, factors) = part.beside(view, Pruned::Mask(mask.clone()), &inputs).unwrap();
            assert_eq!(*found.mask(), mask);
            let kept = match &found {
                Pruned::Mask(mask) => mask.apply(view).unwrap(),
                Pruned::Solved(solved) => solved.weight.clone(),
            };
            assert!((0..rows * cols).all(|i| mask.is_kept(i / cols, i % cols) || kept[i] == 0.0));
            let sum: Vec<f32> = kept.iter().zip(factors.product()).map(|(a, b)| a + b).collect();
            error_of(&hessian, &matrix, &sum)
        };
        let [one, four] = [1, 4].map(|rank| with(LowRankForm::Eora, Rank::Directions(rank), 0));
        assert!(four < one && one < pruned, "{four} {one} {pruned}");
        let [alone, refitted] = [0, 10].map(|refit| with(LowRankForm::Slim, Rank::Directions(4), refit));
        assert!(refitted < alone && alone < pruned, "{refitted} {alone} {pruned}");
        assert!(with(LowRankForm::Eora, Rank::Share(1.0), 0) < one);
    }

    #[test]
    fn ranks_are_numbers_and_shares() {
        for (text, rank, of) in
            [("64", Rank::Directions(64), 16), ("5%", Rank::Share(0.05), 1), ("50%", Rank::Share(0.5), 6)]
        {
            let parsed: Rank = text.parse().unwrap();
            assert_eq!((parsed, parsed.to_string().as_str(), parsed.of(16, 64)), (rank, text, of));
        }
        for text in ["0", "", "-1", "0%", "101%", "x%", "NaN%", "1.5"] {
            assert!(text.parse::<Rank>().is_err(), "{text}");
        }
    }
}
