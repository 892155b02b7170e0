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
    AlpsState, Backend, Cpu, Method, Pruned, Refit, Solved, Values,
    method::{hessian_of, pattern_error},
    normal::{Damped, finite_weight},
    refit_on,
};
use crate::{
    Element, Error, Mask, MatrixRef, Pattern, Result,
    calibration::{Hessian, Statistic, StatisticKind},
    select::Sparsity,
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
    alps_on(&Cpu, matrix, hessian, settings)
}

/// [`alps`] on a backend.
///
/// # Errors
/// Those of [`alps`] and of the backend.
pub fn alps_on<T: Element>(
    backend: &dyn Backend,
    matrix: MatrixRef<'_, T>,
    hessian: &Hessian,
    settings: &Alps,
) -> Result<Solved> {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    let dense = finite_weight(matrix, hessian)?;
    let damped = Damped::new(hessian, settings.damping)?;
    let mut solved =
        Solved { weight: vec![], mask: Mask::empty(rows, cols), integers: None, scales: None, squared_error: 0.0 };
    if dense.is_empty() {
        return Ok(solved);
    }
    let roots: Vec<f32> = damped.diagonal().map(f32::sqrt).collect();
    let mut search = Search::new((backend, settings), &dense, damped, &roots)?;
    // Of a layer whose inputs were all zero every mask is as good: that of the largest weights is taken.
    let is_silent = hessian.diagonal().iter().all(|d| *d == 0.0);
    if !is_silent {
        search.run()?;
    }
    let AlpsState { fit, sparse, .. } = search.state;
    let fit = if is_silent { sparse } else { fit };
    let mask = backend.largest(settings.pattern, cols, &fit, None)?;
    solved.mask = backend.download_mask(&mask, rows, cols)?;
    let mut fit = backend.download(fit)?;
    fit.par_chunks_mut(cols).for_each(|row| row.iter_mut().zip(&roots).for_each(|(value, root)| *value /= root));
    let dense = MatrixRef::new(rows, cols, &dense)?;
    solved.weight = refit_on(backend, dense, &solved.mask, Some(&fit), hessian, &settings.refit)?;
    let difference: Vec<f32> = dense.data().par_iter().zip(&solved.weight).map(|(w, own)| w - own).collect();
    solved.squared_error = backend.squared_outputs(hessian, MatrixRef::new(rows, cols, &difference)?)?;
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

    fn prune(
        &self,
        backend: &dyn Backend,
        weight: MatrixRef<'_, f32>,
        sparsity: Sparsity,
        inputs: Option<&Statistic>,
    ) -> Result<Pruned> {
        let Sparsity::Groups(pattern) = sparsity else { return Err(pattern_error(self, sparsity)) };
        let settings = Alps { refit: Refit { steps: 0, ..Refit::default() }, ..Alps::new(pattern) };
        Ok(Pruned::Solved(alps_on(backend, weight, hessian_of(inputs)?, &settings)?))
    }
}

/// The iteration, all of it in units of a unit diagonal.
struct Search<'a> {
    backend: &'a dyn Backend,
    settings: &'a Alps,
    rows: usize,
    cols: usize,
    /// `H`.
    hessian: Values,
    /// `(H + σ I)⁻¹`.
    inverse: Values,
    /// `σ`.
    center: f64,
    /// `ρ`.
    penalty: f64,
    /// `W`.
    dense: Values,
    state: AlpsState,
    /// What is kept of `D`.
    mask: Values,
}

impl<'a> Search<'a> {
    fn new(
        (backend, settings): (&'a dyn Backend, &'a Alps),
        dense: &[f32],
        damped: Damped,
        roots: &[f32],
    ) -> Result<Self> {
        let cols = damped.features();
        let mut hessian = damped.into_values();
        hessian.par_chunks_mut(cols).zip(roots).for_each(|(row, own)| {
            row.iter_mut().zip(roots).for_each(|(value, root)| *value /= own * root);
        });
        let mut scaled = dense.to_vec();
        scaled.par_chunks_mut(cols).for_each(|row| row.iter_mut().zip(roots).for_each(|(w, root)| *w *= root));
        let (hessian, dense, rows) = (backend.upload(hessian)?, backend.upload(scaled)?, dense.len() / cols);
        let mut outputs = backend.zeros(rows * cols)?;
        backend.product(&dense, &hessian, cols, &mut outputs)?;
        let mask = backend.largest(settings.pattern, cols, &dense, None)?;
        let (fit, mut sparse) = (backend.copy(&dense)?, backend.copy(&dense)?);
        backend.apply(&mask, cols, &mut sparse)?;
        let state = AlpsState { outputs, fit, sparse, multiplier: backend.zeros(rows * cols)? };
        let (inverse, center, penalty) = (backend.zeros(0)?, 0.0, PENALTY);
        Ok(Search { backend, settings, rows, cols, hessian, inverse, center, penalty, dense, state, mask })
    }

    /// Begins anew with the best elements of the dense weight.
    fn restart(&mut self) -> Result<()> {
        let Search { backend, settings, rows, cols, dense, state, mask, .. } = self;
        *mask = backend.largest(settings.pattern, *cols, dense, None)?;
        state.sparse = backend.copy(dense)?;
        state.fit = backend.copy(dense)?;
        backend.apply(mask, *cols, &mut state.sparse)?;
        state.multiplier = backend.zeros(*rows * *cols)?;
        Ok(())
    }

    /// Inverts for a penalty above the present one, which grows, unless the last inverse serves.
    fn invert(&mut self) -> Result<()> {
        let near = if self.rows < self.cols { NEAR } else { 1.0 };
        if (self.center / near..=self.center * near).contains(&self.penalty) {
            return Ok(());
        }
        self.center = self.penalty * near;
        let failed = |feature| Error::NotPositiveDefinite { feature, damping: self.settings.damping };
        self.inverse = self.backend.inverse(&self.hessian, self.cols, self.center as f32)?.map_err(failed)?;
        Ok(())
    }

    fn run(&mut self) -> Result<()> {
        let first = self.backend.download_mask(&self.mask, self.rows, self.cols)?;
        let kept = first.count().max(1) as f64;
        self.invert()?;
        let mut seen = self.backend.upload_mask(&first, 0..self.rows)?;
        let mut has_moved = false;
        for iteration in 1..=self.settings.iterations {
            let mask = self.iterate()?;
            if iteration % LOOK != 0 {
                continue;
            }
            let changed = self.backend.differences(&mask, &seen)?;
            seen = mask;
            let share = changed as f64 / kept;
            has_moved |= share > 0.005;
            match (changed, has_moved) {
                (0, true) => break,
                (0, false) => self.penalty /= 5.0,
                (_, false) => {
                    self.penalty /= 5.0;
                    self.restart()?;
                    seen = self.backend.upload_mask(&first, 0..self.rows)?;
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

    /// Returns the mask of the next `D`.
    fn iterate(&mut self) -> Result<Values> {
        let Search { backend, settings, cols, inverse, penalty, center, state, .. } = self;
        let (shift, penalty) = ((*penalty - *center) as f32, *penalty as f32);
        backend.alps_right(state, *cols, penalty, shift)?;
        backend.product(&state.sparse, inverse, *cols, &mut state.fit)?;
        let mask = backend.largest(settings.pattern, *cols, &state.fit, Some((1.0 / penalty, &state.multiplier)))?;
        backend.alps_project(state, *cols, &mask, penalty)?;
        Ok(mask)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Axis, select,
        select::Sparsity,
        solve::{
            SparseGpt, refit, sparsegpt,
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

    /// Another backend's sums are rounded otherwise, as are those of inputs that differ by that much.
    #[test]
    fn a_search_whose_numbers_are_rounded_otherwise_leaves_the_same_error() {
        for (rows, cols) in [(64, 256), (300, 96), (40, 128), (16, 130), (24, 64)] {
            let w = random(rows * cols, 21);
            let matrix = MatrixRef::new(rows, cols, &w).unwrap();
            let hessian = correlated(cols, 3 * cols);
            let mut next = 0u32;
            let off = |value: &f32| {
                next = next.wrapping_mul(1664525).wrapping_add(1013904223);
                value * (1.0 + ((next >> 28) as f32 - 7.5) * 6e-8)
            };
            let sums = hessian.lower().iter().map(off).collect();
            let other = Hessian::from_matrix(cols, sums, hessian.tokens()).unwrap();
            let of = |hessian: &Hessian| alps(matrix, hessian, &Alps::new(Pattern::TWO_FOUR)).unwrap();
            let (found, expected) = (of(&other), of(&hessian));
            let (flips, kept) = (found.mask.flips(&expected.mask).unwrap(), expected.mask.count());
            let errors = found.squared_error / expected.squared_error;
            assert!((errors - 1.0).abs() < 0.02, "{rows} x {cols}: {errors} of the error, {flips} of {kept} moved");
        }
    }
}
