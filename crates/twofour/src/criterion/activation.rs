//! Criteria that require the norms of a layer's inputs.

use rayon::prelude::*;

use super::{Criterion, Scorer, Weight, expect_length};
use crate::{Error, Result, calibration::InputNorms};

/// Scores every element of a column by its input feature's norm `‖x_j‖₂`: with a mask of columns, structured pruning of
/// inputs.
#[derive(Debug, Clone, Copy)]
pub struct ActivationNorm<'a> {
    /// Norms of the layer's inputs.
    pub norms: &'a InputNorms,
}

impl Criterion for ActivationNorm<'_> {
    fn scorer<'a>(&'a self, weight: &Weight<'a>) -> Result<Scorer<'a>> {
        let norms = norms_of(self.norms, weight)?;
        Ok(Box::new(move |_, _, scores| scores.copy_from_slice(&norms)))
    }
}

/// Which power of the norm Wanda multiplies with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum WandaVariant {
    /// `|w| · ‖x_j‖₂`, the paper's.
    #[default]
    Paper,
    /// `|w| · ‖x_j‖₂²`: what `torchao.sparsity.wanda` computed, whose observer took no root. With an unstructured
    /// sparsity torchao also compared over the whole weight: [`Sparsity::Tensor`](crate::select::Sparsity::Tensor).
    Torchao,
}

/// Scores an element by its magnitude times the norm of its input feature (Sun et al., "A Simple and Effective Pruning
/// Approach for Large Language Models", ICLR 2024). The paper compares inside a row:
/// [`Sparsity::Groups`](crate::select::Sparsity::Groups) or [`Sparsity::EachRow`](crate::select::Sparsity::EachRow).
#[derive(Debug, Clone, Copy)]
pub struct Wanda<'a> {
    /// Norms of the layer's inputs.
    pub norms: &'a InputNorms,
    /// The power of the norm.
    pub variant: WandaVariant,
}

impl Criterion for Wanda<'_> {
    fn scorer<'a>(&'a self, weight: &Weight<'a>) -> Result<Scorer<'a>> {
        let mut norms = norms_of(self.norms, weight)?;
        if self.variant == WandaVariant::Torchao {
            norms = self.norms.sums_of_squares().iter().map(|sum| *sum as f32).collect();
        }
        Ok(Box::new(move |_, weights, scores| {
            for ((out, w), norm) in scores.iter_mut().zip(weights).zip(&norms) {
                *out = w.abs() * norm;
            }
        }))
    }
}

/// Scores an element by its share of its column and of its row, times a power of its input feature's norm (relative
/// importance and activations, Zhang et al., "Plug-and-Play: An Efficient Post-training Pruning Method for Large
/// Language Models", ICLR 2024).
///
/// A column or row of zeros gives its elements a share of zero.
#[derive(Debug, Clone, Copy)]
pub struct Ria<'a> {
    /// Norms of the layer's inputs.
    pub norms: &'a InputNorms,
    /// The power of the norm; the paper's is [`Ria::EXPONENT`].
    pub exponent: f32,
}

impl Ria<'_> {
    /// The power of the norm in the paper.
    pub const EXPONENT: f32 = 0.5;
}

impl Criterion for Ria<'_> {
    fn scorer<'a>(&'a self, weight: &Weight<'a>) -> Result<Scorer<'a>> {
        if !self.exponent.is_finite() || self.exponent < 0.0 {
            let value = f64::from(self.exponent);
            return Err(Error::Setting { what: "RIA's exponent", value, expected: "finite and not negative" });
        }
        let norms = norms_of(self.norms, weight)?;
        let powers: Vec<f32> = norms.iter().map(|norm| libm::powf(*norm, self.exponent)).collect();
        let inverse = |sum: f64| if sum > 0.0 { 1.0 / sum } else { 0.0 };
        let columns: Vec<f64> = column_sums(weight).into_iter().map(inverse).collect();
        Ok(Box::new(move |_, weights, scores| {
            let of_row = inverse(weights.iter().map(|w| f64::from(w.abs())).sum());
            for (((out, w), of_column), power) in scores.iter_mut().zip(weights).zip(&columns).zip(&powers) {
                *out = (f64::from(w.abs()) * (of_column + of_row)) as f32 * power;
            }
        }))
    }
}

/// `Σ_i |w_ij|` of every column, added up in blocks of rows whose order does not depend on the threads.
fn column_sums(weight: &Weight<'_>) -> Vec<f64> {
    const ROWS: usize = 64;
    let cols = weight.cols();
    let blocks: Vec<Vec<f64>> = (0..weight.rows().div_ceil(ROWS))
        .into_par_iter()
        .map(|block| {
            let (mut sums, mut values) = (vec![0f64; cols], vec![0f32; cols]);
            for row in block * ROWS..((block + 1) * ROWS).min(weight.rows()) {
                weight.read_row(row, &mut values);
                sums.iter_mut().zip(&values).for_each(|(sum, w)| *sum += f64::from(w.abs()));
            }
            sums
        })
        .collect();
    let mut total = vec![0f64; cols];
    for block in blocks {
        total.iter_mut().zip(block).for_each(|(total, sum)| *total += sum);
    }
    total
}

/// The norms, one for each column of the weight.
fn norms_of(norms: &InputNorms, weight: &Weight<'_>) -> Result<Vec<f32>> {
    expect_length("norms of input features", weight.cols(), norms.features())?;
    norms.l2()
}
