//! Criteria that require second derivatives of the layer's squared output error.

use super::{Criterion, Scorer, Weight, expect_length};
use crate::{Error, Result};

/// Scores an element by `½ w² H_jj`: the increase of the error when it is pruned alone and nothing else changes
/// (optimal brain damage, LeCun et al., NeurIPS 1989).
#[derive(Debug, Clone, Copy)]
pub struct OptimalBrainDamage<'a> {
    /// The Hessian's diagonal, one value for each input feature
    /// ([`Hessian::diagonal`](crate::calibration::Hessian::diagonal)) or for each element.
    pub diagonal: &'a [f32],
}

impl Criterion for OptimalBrainDamage<'_> {
    fn scorer<'a>(&'a self, weight: &Weight<'a>) -> Result<Scorer<'a>> {
        let cols = weight.cols();
        let of_elements = weight.rows() > 1 && self.diagonal.len() == weight.rows() * cols;
        if !of_elements {
            expect_length("diagonal of the Hessian", cols, self.diagonal.len())?;
        }
        check("the Hessian's diagonal at", self.diagonal)?;
        Ok(Box::new(move |row, weights, scores| {
            let first = if of_elements { row * cols } else { 0 };
            for ((out, w), h) in scores.iter_mut().zip(weights).zip(&self.diagonal[first..]) {
                *out = 0.5 * w * w * h;
            }
        }))
    }
}

/// Scores an element by `½ w² / (H⁻¹)_jj`: the increase of the error when it is pruned alone and all others of its row
/// are adjusted (optimal brain surgeon, Hassibi and Stork, NeurIPS 1992). [`sparsegpt`](mod@crate::solve::sparsegpt)
/// does adjust them.
#[derive(Debug, Clone, Copy)]
pub struct OptimalBrainSurgeon<'a> {
    /// The diagonal of the Hessian's inverse, one value for each input feature
    /// ([`Hessian::inverse_diagonal`](crate::calibration::Hessian::inverse_diagonal)).
    pub inverse_diagonal: &'a [f32],
}

impl Criterion for OptimalBrainSurgeon<'_> {
    fn scorer<'a>(&'a self, weight: &Weight<'a>) -> Result<Scorer<'a>> {
        expect_length("diagonal of the Hessian's inverse", weight.cols(), self.inverse_diagonal.len())?;
        check("the diagonal of the Hessian's inverse at", self.inverse_diagonal)?;
        Ok(Box::new(|_, weights, scores| {
            for ((out, w), h) in scores.iter_mut().zip(weights).zip(self.inverse_diagonal) {
                // A feature that never varies has an infinite inverse's reciprocal of zero; an inverse of zero an
                // infinite one.
                *out = if *w == 0.0 { 0.0 } else { 0.5 * w * w / h };
            }
        }))
    }
}

fn check(what: &'static str, values: &[f32]) -> Result<()> {
    match values.iter().position(|v| !v.is_finite() || *v < 0.0) {
        None => Ok(()),
        Some(index) => Err(Error::Statistic { what, index, value: f64::from(values[index]) }),
    }
}
