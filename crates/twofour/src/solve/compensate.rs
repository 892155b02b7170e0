//! Making up for the errors of earlier layers.
//!
//! In a pruned model a layer reads inputs `X` that differ from those of the dense model, `X₀`. A weight that keeps the
//! layer's own outputs on `X` hands the difference on. The weight that comes nearest to the dense outputs `W·X₀` solves
//!
//! ```text
//! min ‖T·X - W·X₀‖²        T = W C H⁻¹ = W + W (C - H) H⁻¹        with C = X₀·Xᵀ and H = X·Xᵀ
//! ```
//!
//! `W C` is also `Y₀·Xᵀ`, with the dense model's outputs: fewer products where a layer has fewer outputs than inputs.
//!
//! `T` takes the place of the dense weight: it is what a pruning method prunes. The whole correction follows the
//! calibration text too closely; a share of it generalizes better. The idea is GPTAQ's (Li et al., "GPTAQ: Efficient
//! Finetuning-Free Quantization for Asymmetric Calibration", ICML 2025), here as a weight, so that it serves every
//! method.

use rayon::prelude::*;

use super::{
    Backend, Cpu,
    normal::{Damped, finite_weight},
};
use crate::{
    Element, Error, MatrixRef, Result,
    calibration::{CrossProducts, DenseSide, Hessian},
};

/// Settings of [`compensated`](compensated()).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Compensation {
    /// The share of the correction: from 0, which leaves the weight as it is, to 1.
    pub share: f64,
    /// What is added to the Hessian's diagonal, as a share of its mean.
    pub damping: f64,
}

impl Default for Compensation {
    /// Half of the correction, damping 0.01.
    fn default() -> Self {
        Self { share: 0.5, damping: 0.01 }
    }
}

/// Returns the weight, `[rows, cols]`, that comes near the outputs which a layer with the weight `dense` has in the
/// dense model, from the inputs that it has in the pruned one.
///
/// # Errors
/// [`Error::NotANumber`] or [`Error::Infinite`] with the place; [`Error::Length`] where a statistic is of another
/// number of features; [`Error::NotPositiveDefinite`], [`Error::NoTokens`], [`Error::Setting`].
pub fn compensated<T: Element>(
    dense: MatrixRef<'_, T>,
    hessian: &Hessian,
    cross: &CrossProducts,
    settings: &Compensation,
) -> Result<Vec<f32>> {
    compensated_on(&Cpu, dense, hessian, cross, settings)
}

/// [`compensated`] on a backend.
///
/// # Errors
/// Those of [`compensated`] and of the backend.
pub fn compensated_on<T: Element>(
    backend: &dyn Backend,
    dense: MatrixRef<'_, T>,
    hessian: &Hessian,
    cross: &CrossProducts,
    settings: &Compensation,
) -> Result<Vec<f32>> {
    let (rows, cols) = (dense.rows(), dense.cols());
    if cross.features() != cols {
        return Err(Error::Length { what: "input features of both models", expected: cols, found: cross.features() });
    }
    if let DenseSide::Outputs(found) = cross.dense_side()
        && found != rows
    {
        return Err(Error::Length { what: "outputs of the dense model", expected: rows, found });
    }
    if !(0.0..=1.0).contains(&settings.share) {
        let (what, value) = ("the share of a correction", settings.share);
        return Err(Error::Setting { what, value, expected: "from 0 to 1" });
    }
    let mut weight = finite_weight(dense, hessian)?;
    if weight.is_empty() || settings.share == 0.0 {
        return Ok(weight);
    }
    // W (C - H), without the damping and without what stands for features that had no inputs.
    let mut products = Damped::new(hessian, 0.0)?.into_values();
    for (feature, d) in hessian.diagonal().iter().enumerate().filter(|(_, d)| **d == 0.0) {
        products[feature * cols + feature] = *d;
    }
    let subtract = |values: &mut [f32]| {
        values.par_iter_mut().zip(cross.sums()).for_each(|(value, cross)| *value = cross - *value);
    };
    if cross.dense_side() == DenseSide::Inputs {
        subtract(&mut products);
    }
    let mut right = backend.zeros(rows * cols)?;
    backend.product(&backend.upload(weight.clone())?, &backend.upload(products)?, cols, &mut right)?;
    if let DenseSide::Outputs(_) = cross.dense_side() {
        let mut values = backend.download(right)?;
        subtract(&mut values);
        right = backend.upload(values)?;
    }
    let damping = settings.damping;
    let damped = backend.upload(Damped::new(hessian, damping)?.into_values())?;
    let failed = |feature| Error::NotPositiveDefinite { feature, damping };
    let inverse = backend.inverse(&damped, cols, 0.0)?.map_err(failed)?;
    let mut correction = backend.zeros(rows * cols)?;
    backend.product(&right, &inverse, cols, &mut correction)?;
    let correction = backend.download(correction)?;
    let share = settings.share as f32;
    weight.par_iter_mut().zip(&correction).for_each(|(value, correction)| *value += share * correction);
    Ok(weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::solve::testing::random;

    /// Inputs of 8 features for two models: those of the pruned one are a little off.
    fn inputs(tokens: usize) -> (Vec<f32>, Vec<f32>, Hessian, CrossProducts) {
        let dense = random(8 * tokens, 5);
        let noise = random(8 * tokens, 6);
        let mixed = |i: usize| 0.9 * dense[i] + 0.2 * dense[i ^ 1] + 0.05 * noise[i];
        let pruned: Vec<f32> = (0..dense.len()).map(mixed).collect();
        let (mut hessian, mut cross) = (Hessian::new(8).unwrap(), CrossProducts::new(DenseSide::Inputs, 8).unwrap());
        hessian.add(&pruned).unwrap();
        cross.add(&dense, &pruned).unwrap();
        (dense, pruned, hessian, cross)
    }

    fn outputs(weight: &[f32], x: &[f32]) -> Vec<f32> {
        let rows = |token: &[f32]| weight.chunks(8).map(|w| w.iter().zip(token).map(|(w, x)| w * x).sum()).collect();
        x.chunks(8).flat_map(|token| -> Vec<f32> { rows(token) }).collect()
    }

    #[test]
    fn the_weight_comes_nearer_to_the_dense_outputs_the_larger_the_share() {
        let (dense, pruned, hessian, cross) = inputs(200);
        let w = random(5 * 8, 7);
        let matrix = MatrixRef::new(5, 8, &w).unwrap();
        let expected = outputs(&w, &dense);
        let error = |share| {
            let settings = Compensation { share, damping: 1e-6 };
            let weight = compensated(matrix, &hessian, &cross, &settings).unwrap();
            outputs(&weight, &pruned).iter().zip(&expected).map(|(a, b)| (a - b) * (a - b)).sum::<f32>()
        };
        let errors = [0.0, 0.5, 0.9, 1.0].map(error);
        assert!(errors.windows(2).all(|pair| pair[1] < pair[0]), "{errors:?}");
        assert!(errors[3] < 0.1 * errors[0], "{errors:?}");
        assert_eq!(compensated(matrix, &hessian, &cross, &Compensation { share: 0.0, damping: 0.1 }).unwrap(), w);
    }

    #[test]
    fn equal_inputs_change_nothing_and_bad_operands_are_errors() {
        let (_, pruned, hessian, cross) = inputs(100);
        let w = random(2 * 8, 9);
        let matrix = MatrixRef::new(2, 8, &w).unwrap();
        let mut same = CrossProducts::new(DenseSide::Inputs, 8).unwrap();
        same.add(&pruned, &pruned).unwrap();
        let found = compensated(matrix, &hessian, &same, &Compensation::default()).unwrap();
        assert!(found.iter().zip(&w).all(|(a, b)| (a - b).abs() < 1e-4), "{found:?}");
        let settings = Compensation::default();
        assert!(compensated(matrix, &hessian, &CrossProducts::new(DenseSide::Inputs, 4).unwrap(), &settings).is_err());
        assert!(compensated(matrix, &Hessian::new(4).unwrap(), &cross, &settings).is_err());
        assert!(compensated(matrix, &Hessian::new(8).unwrap(), &cross, &settings).is_err());
        for share in [-0.1, 1.5, f64::NAN] {
            assert!(compensated(matrix, &hessian, &cross, &Compensation { share, ..settings }).is_err());
        }
        let bad = MatrixRef::new(1, 8, &[f32::NAN; 8]).unwrap();
        assert!(matches!(compensated(bad, &hessian, &cross, &settings), Err(Error::NotANumber { .. })));
    }

    #[test]
    fn outputs_of_the_dense_model_lead_to_the_same_weight_as_its_inputs() {
        let (dense, pruned, hessian, cross) = inputs(200);
        let w = random(5 * 8, 11);
        let matrix = MatrixRef::new(5, 8, &w).unwrap();
        let mut of_outputs = CrossProducts::new(DenseSide::Outputs(5), 8).unwrap();
        of_outputs.add(&outputs(&w, &dense), &pruned).unwrap();
        let settings = Compensation::default();
        let [a, b] = [&cross, &of_outputs].map(|cross| compensated(matrix, &hessian, cross, &settings).unwrap());
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-4) && a != w, "{a:?} {b:?}");
        let other = MatrixRef::new(4, 8, &w[..32]).unwrap();
        assert!(matches!(compensated(other, &hessian, &of_outputs, &settings), Err(Error::Length { found: 5, .. })));
    }
}
