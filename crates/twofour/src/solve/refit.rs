//! Refitting: the best kept weights for a mask that stays as it is.
//!
//! For a row `w` of the dense weight and the damped Hessian `H` of its inputs, the row `ŵ` that obeys the mask and
//! changes the outputs least solves
//!
//! ```text
//! min (ŵ - w) · H · (ŵ - w)ᵀ        ŵ = 0 outside of the mask
//! ```
//!
//! by conjugate gradients, preconditioned with the diagonal of `H`. Residuals and directions are set to zero outside of
//! the mask, so that steps stay in it. All rows take a step together: one product `[rows, cols] · [cols, cols]`; each
//! row has its own step length. This is the last stage of ALPS (Meng, Behdin, Wang and Mazumder, "ALPS: Improved
//! Optimization for Highly Sparse One-Shot Pruning for Large Language Models", NeurIPS 2024), and serves after any
//! method.

use rayon::prelude::*;

use super::{
    Backend, Cpu, RefitRows,
    normal::{Damped, finite_weight},
};
use crate::{Element, Error, Mask, MatrixRef, Result, calibration::Hessian, mask::zero_pruned};

/// Rows that take their steps together: bounds the memory that directions and residuals take.
const BAND: usize = 2048;

/// Settings of [`refit`](refit()).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Refit {
    /// Steps of conjugate gradients. The first ten bring most of what there is to gain.
    pub steps: usize,
    /// What is added to the Hessian's diagonal, as a share of its mean.
    pub damping: f64,
}

impl Default for Refit {
    /// Ten steps, damping 0.01.
    fn default() -> Self {
        Self { steps: 10, damping: 0.01 }
    }
}

/// Returns the kept weights, `[rows, cols]` with +0.0 where the mask prunes, that change the outputs of a layer with
/// the dense weight `dense` least, as far as `settings.steps` lead from `start` (the dense weight under the mask, or
/// what a solver found).
///
/// The result is never worse than the start by more than rounding, and the same with any number of threads. A feature
/// that was zero on all of calibration keeps its dense weights where the mask keeps them.
///
/// # Errors
/// [`Error::NotANumber`] or [`Error::Infinite`] with the place; [`Error::Shape`] and [`Error::Length`] for a mask, a
/// start or a Hessian of another shape; [`Error::NoTokens`], [`Error::Setting`].
///
/// ```
/// use twofour::{MatrixRef, Pattern, calibration::Hessian, select, solve::{Refit, refit}};
/// // Features 0 and 1 are always equal: one of them can stand for both.
/// let mut hessian = Hessian::new(4)?;
/// hessian.add(&[1.0, 1.0, 0.0, 2.0, -3.0, -3.0, 1.0, 0.0, 2.0, 2.0, 5.0, 1.0])?;
/// let w = MatrixRef::new(1, 4, &[1.0f32, 0.9, 0.1, 3.0])?;
/// let mask = select::magnitude(w, Pattern::TWO_FOUR, twofour::Axis::Row)?;
/// let refitted = refit(w, &mask, None, &hessian, &Refit::default())?;
/// assert!((refitted[0] - 1.9).abs() < 0.05 && refitted[1] == 0.0);
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn refit<T: Element>(
    dense: MatrixRef<'_, T>,
    mask: &Mask,
    start: Option<&[f32]>,
    hessian: &Hessian,
    settings: &Refit,
) -> Result<Vec<f32>> {
    refit_on(&Cpu, dense, mask, start, hessian, settings)
}

/// [`refit`] on a backend.
///
/// # Errors
/// Those of [`refit`] and of the backend.
pub fn refit_on<T: Element>(
    backend: &dyn Backend,
    dense: MatrixRef<'_, T>,
    mask: &Mask,
    start: Option<&[f32]>,
    hessian: &Hessian,
    settings: &Refit,
) -> Result<Vec<f32>> {
    let (rows, cols) = (dense.rows(), dense.cols());
    mask.expect_shape("mask", rows, cols)?;
    let dense = finite_weight(dense, hessian)?;
    if let Some(start) = start {
        if start.len() != dense.len() {
            return Err(Error::Length { what: "the weight to refit", expected: dense.len(), found: start.len() });
        }
        MatrixRef::new(rows, cols, start)?.expect_finite()?;
    }
    let mut weight = start.map_or_else(|| dense.clone(), <[f32]>::to_vec);
    if weight.is_empty() {
        return Ok(weight);
    }
    let damped = Damped::new(hessian, settings.damping)?;
    let inverse: Vec<f32> = damped.diagonal().map(|d| 1.0 / d).collect();
    weight.par_chunks_mut(cols).enumerate().for_each(|(row, values)| zero_pruned(values, mask.row_words(row)));
    if settings.steps == 0 {
        return Ok(weight);
    }
    let square = backend.upload(damped.into_values())?;
    for (band, (weight, dense)) in weight.chunks_mut(BAND * cols).zip(dense.chunks(BAND * cols)).enumerate() {
        let (first, rows, len) = (band * BAND, dense.len() / cols, dense.len());
        let direction: Vec<f32> = dense.par_iter().zip(&*weight).map(|(dense, own)| dense - own).collect();
        let mut state = RefitRows {
            cols,
            mask: backend.upload_mask(mask, first..first + rows)?,
            inverse: backend.upload(inverse.clone())?,
            weight: backend.upload(weight.to_vec())?,
            residual: backend.zeros(len)?,
            direction: backend.upload(direction)?,
            product: backend.zeros(len)?,
            norms: backend.row_sums(rows)?,
        };
        backend.product(&state.direction, &square, cols, &mut state.residual)?;
        backend.refit_begin(&mut state)?;
        for _ in 0..settings.steps {
            backend.product(&state.direction, &square, cols, &mut state.product)?;
            backend.refit_step(&mut state)?;
        }
        weight.copy_from_slice(&backend.download(state.weight)?);
    }
    Ok(weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Axis, Pattern, select,
        solve::testing::{correlated, error_of, random},
    };

    #[test]
    fn enough_steps_solve_the_normal_equations_of_each_row() {
        let (rows, cols) = (5, 24);
        let hessian = correlated(cols, 90);
        let w = random(rows * cols, 3);
        let matrix = MatrixRef::new(rows, cols, &w).unwrap();
        let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
        let settings = Refit { steps: 60, ..Refit::default() };
        let found = refit(matrix, &mask, None, &hessian, &settings).unwrap();
        let damped = Damped::new(&hessian, settings.damping).unwrap();
        for row in 0..rows {
            let difference: Vec<f32> = (0..cols).map(|j| found[row * cols + j] - w[row * cols + j]).collect();
            for j in (0..cols).filter(|j| mask.is_kept(row, *j)) {
                let gradient: f32 = difference.iter().zip(damped.row(j)).map(|(d, h)| d * h).sum();
                assert!(gradient.abs() < 1e-3 * damped.row(j)[j], "{row} {j}: {gradient}");
            }
            assert!((0..cols).all(|j| mask.is_kept(row, j) || found[row * cols + j].to_bits() == 0));
        }
    }

    #[test]
    fn each_step_makes_the_error_smaller_and_a_start_is_gone_on_from() {
        let (rows, cols) = (2100, 36);
        let hessian = correlated(cols, 200);
        let w = random(rows * cols, 5);
        let matrix = MatrixRef::new(rows, cols, &w).unwrap();
        let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
        let of = |weight: &[f32]| error_of(&hessian, &w, weight);
        let refitted = |start: Option<&[f32]>, steps| {
            refit(matrix, &mask, start, &hessian, &Refit { steps, damping: 0.0 }).unwrap()
        };
        let masked = mask.apply(matrix).unwrap();
        assert_eq!(refitted(None, 0), masked);
        let mut before = of(&masked);
        for steps in [1, 2, 4, 8, 16] {
            let error = of(&refitted(None, steps));
            assert!(error < before, "{steps}: {error} {before}");
            before = error;
        }
        let first = refitted(None, 8);
        assert!(of(&refitted(Some(&first), 8)) < of(&first));
    }

    #[test]
    fn features_without_input_keep_their_weights_and_bad_operands_are_errors() {
        let mut hessian = Hessian::new(4).unwrap();
        hessian.add(&[0.0, 1.0, 2.0, 3.0, 0.0, 2.0, -1.0, 1.0]).unwrap();
        let w = MatrixRef::new(1, 4, &[5.0f32, 1.0, 2.0, 0.5]).unwrap();
        let mask = Mask::from_fn(1, 4, |_, col| col != 3);
        let found = refit(w, &mask, None, &hessian, &Refit::default()).unwrap();
        assert!((found[0] - 5.0).abs() < 1e-5 && found[3] == 0.0, "{found:?}");
        let settings = Refit::default();
        assert!(refit(w, &Mask::full(2, 4), None, &hessian, &settings).is_err());
        assert!(refit(w, &mask, Some(&[0.0; 3]), &hessian, &settings).is_err());
        assert!(refit(w, &mask, Some(&[f32::NAN; 4]), &hessian, &settings).is_err());
        assert!(refit(w, &mask, None, &Hessian::new(4).unwrap(), &settings).is_err());
        let nan = MatrixRef::new(1, 4, &[1.0, f32::NAN, 0.0, 0.0]).unwrap();
        assert!(matches!(refit(nan, &mask, None, &hessian, &settings), Err(Error::NotANumber { row: 0, col: 1 })));
        assert!(refit(w, &mask, None, &hessian, &Refit { damping: f64::NAN, ..settings }).is_err());
        let empty = MatrixRef::new(0, 4, &[0f32; 0]).unwrap();
        assert!(refit(empty, &Mask::empty(0, 4), None, &hessian, &settings).unwrap().is_empty());
    }
}
