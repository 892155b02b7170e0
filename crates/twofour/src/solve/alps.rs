//! ALPS (Meng, Behdin, Wang and Mazumder, "ALPS: Improved Optimization for Highly Sparse One-Shot Pruning for Large
//! Language Models", NeurIPS 2024).
//!
//! Mask and kept weights of a layer are found together by the alternating direction method of multipliers. A copy `D`
//! of the weight obeys the pattern, a copy `B` fits the outputs, and a multiplier `V` draws them together, the more the
//! larger `ρ` is:
//!
//! ```text
//! B = (H + ρ I)⁻¹ (H W - V + ρ D)        D = the best of each group of B + V / ρ        V += ρ (B - D)
//! ```
//!
//! All of it is in units in which the Hessian has ones on its diagonal. `ρ` begins small, so that masks move, and grows
//! where they move; where they do not move at first, it is lowered and the search begins anew. At the end the kept
//! weights are refitted for the mask ([`refit`](super::refit())).
//!
//! Of a weight with fewer rows than columns an inverse costs as much as several iterations, so it is computed for a
//! penalty `σ` and serves for all `ρ` near it: from the last `B`, a step of
//!
//! ```text
//! B ← (H + σ I)⁻¹ (H W - V + ρ D - (ρ - σ) B)
//! ```
//!
//! leaves at most the share `|ρ - σ| / σ` of what `B` is off. As masks come to rest, so does `B`.

use rayon::prelude::*;

use super::{
    Method, Pruned, Refit, Solved, factor,
    method::{hessian_of, pattern_error},
    normal::{Damped, finite_weight, product},
    refit,
};
use crate::{
    Element, Error, Mask, MatrixRef, Pattern, Result,
    calibration::{Hessian, Statistic, StatisticKind},
    mask::zero_pruned,
    select::{Sparsity, nm},
};

/// Settings of [`alps`](alps()).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Alps {
    /// The pattern along rows.
    pub pattern: Pattern,
    /// What is added to the Hessian's diagonal, as a share of its mean.
    pub damping: f64,
    /// The most iterations; few layers need more than 40.
    pub iterations: usize,
    /// The refit at the end.
    pub refit: Refit,
}

impl Alps {
    /// The paper's settings: damping 0.01, at most 300 iterations, ten steps of refitting.
    pub fn new(pattern: Pattern) -> Self {
        Self { pattern, damping: 0.01, iterations: 300, refit: Refit::default() }
    }
}

/// The first penalty.
const PENALTY: f64 = 0.1;
/// Iterations between two looks at how far the mask has moved.
const LOOK: usize = 3;
/// Iterations before the mask may count as found.
const LEAST: usize = 30;
/// How far the penalty of an inverse may be from the penalty that it serves for, as a factor, where inverses cost more
/// than iterations.
const NEAR: f64 = 1.5;

/// Prunes a layer's weight `[rows, cols]` with the Hessian of its `cols` input features. Ties go to the lower index;
/// the result is the same with any number of threads.
///
/// Takes a product `[rows, cols] · [cols, cols]` an iteration and some inverses of order `cols`: several times as long
/// as [`sparsegpt`](super::sparsegpt()), and leaves a quarter to a third less of the layer's error.
///
/// # Errors
/// [`Error::NotANumber`] or [`Error::Infinite`] with the place; [`Error::Length`] where the Hessian is of another
/// number of features; [`Error::NotPositiveDefinite`], [`Error::NoTokens`], [`Error::Setting`].
///
/// ```
/// use twofour::{MatrixRef, Pattern, calibration::Hessian, solve::{Alps, alps}};
/// // Features 0 and 1 are always equal: one of them stands for both.
/// let mut hessian = Hessian::new(4)?;
/// hessian.add(&[1.0, 1.0, 0.0, 2.0, -3.0, -3.0, 1.0, 0.0, 2.0, 2.0, 5.0, 1.0])?;
/// let w = [1.0f32, 0.9, 0.1, 3.0];
/// let solved = alps(MatrixRef::new(1, 4, &w)?, &hessian, &Alps::new(Pattern::TWO_FOUR))?;
/// assert!(solved.mask.is_kept(0, 0) != solved.mask.is_kept(0, 1) && solved.mask.is_kept(0, 3));
/// assert!((solved.weight[0] + solved.weight[1] - 1.9).abs() < 0.05);
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn alps<T: Element>(matrix: MatrixRef<'_, T>, hessian: &Hessian, settings: &Alps) -> Result<Solved> {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    let dense = finite_weight(matrix, hessian)?;
    let damped = Damped::new(hessian, settings.damping)?;
    let mut solved =
        Solved { weight: vec![], mask: Mask::empty(rows, cols), integers: None, scales: None, squared_error: 0.0 };
    if dense.is_empty() {
        return Ok(solved);
    }
    let roots: Vec<f32> = damped.diagonal().map(f32::sqrt).collect();
    let mut search = Search::new(settings, &dense, damped, &roots);
    // Of a layer whose inputs were all zero every mask is as good: that of the largest weights is taken.
    let is_silent = hessian.diagonal().iter().all(|d| *d == 0.0);
    if !is_silent {
        search.run()?;
    }
    let mut fit = if is_silent { search.sparse } else { search.fit };
    solved.mask = best_of(settings.pattern, &fit, &[], rows);
    fit.par_chunks_mut(cols).for_each(|row| row.iter_mut().zip(&roots).for_each(|(value, root)| *value /= root));
    let dense = MatrixRef::new(rows, cols, &dense)?;
    solved.weight = refit(dense, &solved.mask, Some(&fit), hessian, &settings.refit)?;
    let difference: Vec<f32> = dense.data().par_iter().zip(&solved.weight).map(|(w, own)| w - own).collect();
    solved.squared_error = hessian.squared_outputs(MatrixRef::new(rows, cols, &difference)?)?;
    Ok(solved)
}

/// ALPS by its name. The refit is left to what follows.
#[derive(Debug)]
pub(super) struct ByAlps;

impl Method for ByAlps {
    fn name(&self) -> &'static str {
        "alps"
    }

    fn about(&self) -> &'static str {
        "Find mask and weights together: the least error, in about ten times SparseGPT's time"
    }

    fn requires(&self) -> StatisticKind {
        StatisticKind::Hessian
    }

    fn patterns(&self) -> &'static str {
        "N:M"
    }

    fn prunes_to(&self, sparsity: Sparsity) -> bool {
        matches!(sparsity, Sparsity::Groups(_))
    }

    fn prune(&self, weight: MatrixRef<'_, f32>, sparsity: Sparsity, inputs: Option<&Statistic>) -> Result<Pruned> {
        let Sparsity::Groups(pattern) = sparsity else { return Err(pattern_error(self, sparsity)) };
        let settings = Alps { refit: Refit { steps: 0, ..Refit::default() }, ..Alps::new(pattern) };
        Ok(Pruned::Solved(alps(weight, hessian_of(inputs)?, &settings)?))
    }
}

/// The mask of the largest squares of each group of `fit + scale · multiplier`, or of `fit` alone.
fn best_of(pattern: Pattern, fit: &[f32], multiplier: &[(f32, &[f32])], rows: usize) -> Mask {
    let cols = fit.len() / rows;
    let mut mask = Mask::empty(rows, cols);
    mask.par_rows_mut().enumerate().for_each_init(
        || vec![0f32; cols],
        |scores, (row, words)| {
            scores.copy_from_slice(&fit[row * cols..][..cols]);
            for (scale, values) in multiplier {
                scores.iter_mut().zip(&values[row * cols..]).for_each(|(score, value)| *score += scale * value);
            }
            scores.iter_mut().for_each(|score| *score *= *score);
            nm::best_of_row(pattern, scores, words);
        },
    );
    mask
}

/// The state of the iteration, all of it in units of a unit diagonal.
struct Search<'a> {
    settings: &'a Alps,
    cols: usize,
    /// `H`.
    hessian: Vec<f32>,
    /// `(H + σ I)⁻¹`.
    inverse: Vec<f32>,
    /// `σ`.
    center: f64,
    /// `ρ`.
    penalty: f64,
    /// `W`.
    dense: Vec<f32>,
    /// `W · H`.
    outputs: Vec<f32>,
    /// `B`.
    fit: Vec<f32>,
    /// `D`.
    sparse: Vec<f32>,
    /// `V`.
    multiplier: Vec<f32>,
    mask: Mask,
}

impl<'a> Search<'a> {
    fn new(settings: &'a Alps, dense: &[f32], damped: Damped, roots: &[f32]) -> Self {
        let cols = damped.features();
        let mut hessian = damped.into_values();
        hessian.par_chunks_mut(cols).zip(roots).for_each(|(row, own)| {
            row.iter_mut().zip(roots).for_each(|(value, root)| *value /= own * root);
        });
        let mut scaled = dense.to_vec();
        scaled.par_chunks_mut(cols).for_each(|row| row.iter_mut().zip(roots).for_each(|(w, root)| *w *= root));
        let mut outputs = vec![0f32; dense.len()];
        product(&scaled, &hessian, cols, &mut outputs);
        let mask = best_of(settings.pattern, &scaled, &[], dense.len() / cols);
        let mut search = Search {
            settings,
            cols,
            hessian,
            inverse: vec![],
            center: 0.0,
            penalty: PENALTY,
            fit: scaled.clone(),
            sparse: scaled.clone(),
            dense: scaled,
            outputs,
            multiplier: vec![0.0; dense.len()],
            mask,
        };
        search.restart();
        search
    }

    /// Begins with the best elements of the dense weight.
    fn restart(&mut self) {
        self.mask = best_of(self.settings.pattern, &self.dense, &[], self.dense.len() / self.cols);
        self.sparse.copy_from_slice(&self.dense);
        self.fit.copy_from_slice(&self.dense);
        let Search { sparse, mask, cols, .. } = self;
        sparse.par_chunks_mut(*cols).enumerate().for_each(|(row, values)| zero_pruned(values, mask.row_words(row)));
        self.multiplier.fill(0.0);
    }

    /// Inverts for a penalty above the present one, which grows, unless the last inverse serves.
    fn invert(&mut self) -> Result<()> {
        let near = if self.dense.len() < self.cols * self.cols { NEAR } else { 1.0 };
        if (self.center / near..=self.center * near).contains(&self.penalty) {
            return Ok(());
        }
        self.center = self.penalty * near;
        self.inverse.clone_from(&self.hessian);
        self.inverse.iter_mut().step_by(self.cols + 1).for_each(|value| *value += self.center as f32);
        let failed = |feature| Error::NotPositiveDefinite { feature, damping: self.settings.damping };
        self.inverse = factor::inverse(&self.inverse, self.cols).map_err(failed)?;
        Ok(())
    }

    fn run(&mut self) -> Result<()> {
        let kept = self.mask.count().max(1) as f64;
        self.invert()?;
        let mut seen = self.mask.clone();
        let mut has_moved = false;
        for iteration in 1..=self.settings.iterations {
            self.iterate();
            if iteration % LOOK != 0 {
                continue;
            }
            let changed = self.mask.flips(&seen)?;
            seen.clone_from(&self.mask);
            let share = changed as f64 / kept;
            has_moved |= share > 0.005;
            match (changed, has_moved) {
                (0, true) => break,
                (0, false) => self.penalty /= 5.0,
                (_, false) => {
                    self.penalty /= 5.0;
                    self.restart();
                    seen.clone_from(&self.mask);
                }
                (_, true) => {
                    self.penalty *= if share > 0.1 {
                        1.3
                    } else if share > 0.005 {
                        1.2
                    } else {
                        1.1
                    }
                }
            }
            // A penalty so small finds what none would: the mask is as it is.
            if iteration >= LEAST && share < 0.0003 || self.penalty < 1e-6 {
                break;
            }
            self.invert()?;
        }
        Ok(())
    }

    fn iterate(&mut self) {
        let Search { settings, cols, inverse, penalty, center, outputs, fit, sparse, multiplier, mask, .. } = self;
        let (cols, shift, penalty) = (*cols, (*penalty - *center) as f32, *penalty as f32);
        // The right side takes the place of D, which is not read again.
        let right = sparse.par_chunks_mut(cols).zip(outputs.par_chunks(cols));
        right.zip(multiplier.par_chunks(cols)).zip(fit.par_chunks(cols)).for_each(
            |(((sparse, outputs), multiplier), fit)| {
                for (((sparse, output), multiplier), fit) in sparse.iter_mut().zip(outputs).zip(multiplier).zip(fit) {
                    *sparse = output - multiplier + penalty * *sparse - shift * fit;
                }
            },
        );
        product(sparse, inverse, cols, fit);
        let rows = fit.len() / cols;
        *mask = best_of(settings.pattern, fit, &[(1.0 / penalty, multiplier)], rows);
        let parts = sparse.par_chunks_mut(cols).zip(fit.par_chunks(cols)).zip(multiplier.par_chunks_mut(cols));
        parts.enumerate().for_each(|(row, ((sparse, fit), multiplier))| {
            for ((sparse, fit), multiplier) in sparse.iter_mut().zip(fit).zip(&*multiplier) {
                *sparse = fit + multiplier / penalty;
            }
            zero_pruned(sparse, mask.row_words(row));
            for ((sparse, fit), multiplier) in sparse.iter().zip(fit).zip(multiplier) {
                *multiplier += penalty * (fit - sparse);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Axis, select,
        select::Sparsity,
        solve::{
            SparseGpt, sparsegpt,
            testing::{correlated, error_of, random},
        },
    };

    #[test]
    fn less_error_is_left_than_by_sparsegpt_and_by_a_refitted_magnitude_mask() {
        for (pattern, cols) in [(Pattern::TWO_FOUR, 64), (Pattern::TWO_FOUR, 62), (Pattern::new(4, 8).unwrap(), 64)] {
            let rows = 48;
            let hessian = correlated(cols, 400);
            let w = random(rows * cols, 21);
            let matrix = MatrixRef::new(rows, cols, &w).unwrap();
            let solved = alps(matrix, &hessian, &Alps::new(pattern)).unwrap();
            solved.mask.verify(pattern, Axis::Row).unwrap();
            let error = error_of(&hessian, &w, &solved.weight);
            assert!((error - solved.squared_error).abs() <= 1e-3 * error);
            let gpt = sparsegpt(matrix, &hessian, &SparseGpt::new(Sparsity::Groups(pattern))).unwrap();
            let magnitude = select::magnitude(matrix, pattern, Axis::Row).unwrap();
            let refitted = refit(matrix, &magnitude, None, &hessian, &Refit { steps: 40, ..Refit::default() }).unwrap();
            for (name, weight) in [("SparseGPT", &gpt.weight), ("magnitude", &refitted)] {
                let other = error_of(&hessian, &w, weight);
                assert!(error < other, "{pattern}, {cols}: ALPS {error}, {name} {other}");
            }
            let pruned = |(i, value): (usize, &f32)| solved.mask.is_kept(i / cols, i % cols) || value.to_bits() == 0;
            assert!(solved.weight.iter().enumerate().all(pruned));
        }
    }

    /// The same rows many times have the same search, in which every penalty has its inverse.
    #[test]
    fn inverses_that_serve_for_several_penalties_cost_little_error() {
        let (rows, cols, times) = (16, 64, 4);
        let hessian = correlated(cols, 400);
        for seed in [21, 22, 23] {
            let w = random(rows * cols, seed);
            let error = |w: &[f32]| {
                let matrix = MatrixRef::new(w.len() / cols, cols, w).unwrap();
                alps(matrix, &hessian, &Alps::new(Pattern::TWO_FOUR)).unwrap().squared_error
            };
            let (few, all) = (error(&w), error(&w.repeat(times)) / times as f64);
            assert!(few <= 1.05 * all, "{seed}: {few} {all}");
        }
    }

    #[test]
    fn groups_small_enough_to_try_all_masks_come_near_the_best() {
        let (rows, cols) = (12, 8);
        let hessian = correlated(cols, 120);
        let w = random(rows * cols, 4);
        let steps = Refit { steps: 30, damping: 0.01 };
        let settings = Alps { refit: steps, ..Alps::new(Pattern::TWO_FOUR) };
        let solved = alps(MatrixRef::new(rows, cols, &w).unwrap(), &hessian, &settings).unwrap();
        let mut best = 0.0;
        for row in w.chunks(cols) {
            let matrix = MatrixRef::new(1, cols, row).unwrap();
            let pairs: Vec<u8> = (0u8..16).filter(|bits| bits.count_ones() == 2).collect();
            let masks = pairs.iter().flat_map(|a| pairs.iter().map(move |b| u32::from(*a) | u32::from(*b) << 4));
            let errors = masks.map(|bits| {
                let mask = Mask::from_fn(1, cols, |_, col| bits >> col & 1 == 1);
                error_of(&hessian, row, &refit(matrix, &mask, None, &hessian, &steps).unwrap())
            });
            best += errors.fold(f64::INFINITY, f64::min);
        }
        assert!(solved.squared_error < 1.25 * best, "{} {best}", solved.squared_error);
    }

    #[test]
    fn layers_without_rows_or_inputs_and_bad_operands() {
        let hessian = correlated(8, 40);
        let settings = Alps::new(Pattern::TWO_FOUR);
        let none = alps(MatrixRef::new(0, 8, &[0f32; 0]).unwrap(), &hessian, &settings).unwrap();
        assert!(none.weight.is_empty());
        let w = random(8, 1);
        let matrix = MatrixRef::new(1, 8, &w).unwrap();
        // A calibration that never reached the layer's inputs leaves the largest weights.
        let mut silent = Hessian::new(8).unwrap();
        silent.add(&[0.0; 16]).unwrap();
        let kept = alps(matrix, &silent, &settings).unwrap();
        assert_eq!(kept.mask, select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap());
        assert!(alps(matrix, &correlated(4, 40), &settings).is_err());
        assert!(matches!(alps(matrix, &Hessian::new(8).unwrap(), &settings), Err(Error::NoTokens { .. })));
        let mut bad = w.clone();
        bad[5] = f32::INFINITY;
        let bad = MatrixRef::new(1, 8, &bad).unwrap();
        assert!(matches!(alps(bad, &hessian, &settings), Err(Error::Infinite { row: 0, col: 5 })));
    }
}
