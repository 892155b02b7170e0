//! SparseGPT (Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", ICML
//! 2023).
//!
//! A row `w` of a layer is pruned column by column, and after each column the later ones are adjusted so that the row's
//! outputs on the calibration inputs change least. With `U` the upper Cholesky factor of the inverse Hessian, the
//! paper's step at column `j` is
//!
//! ```text
//! e_j = (w_j - ŵ_j) / U_jj        w_k -= e_j · U_jk  for k > j        ŵ_j = 0 or w_j
//! ```
//!
//! and the elements of lowest `(w_j / U_jj)²` are pruned. Here neither `H⁻¹` nor `U` is computed. With `H = R·Rᵀ`, `R`
//! upper triangular, `U` is `R⁻¹`. Summed over columns the steps say `D = E·U` for the total change `D = W - Ŵ` of the
//! dense weight, hence `E = D·R`, and the adjusted weight is
//!
//! ```text
//! w_j + a_j / R_jj    with    a_j = Σ_{i<j} d_i · R_ij
//! ```
//!
//! Before columns are pruned together (a group, or a block without a pattern) each is adjusted for what was done before
//! all of them: by `a·R⁻¹`, with their own square of `R` alone, a few multiplications. So one factorization is enough,
//! and its error is not amplified by an inversion. `a` comes in blocks of columns: a GEMM with all changes before the
//! block, then inside the block smaller GEMMs and, in the innermost columns, row by row.

mod solver;

use rayon::prelude::*;

use super::{Backend, Method, Pruned, method::hessian_of, normal::finite_weight};
use crate::{
    Element, Error, Mask, MatrixRef, Result,
    calibration::{Hessian, Statistic, StatisticKind},
    select::Sparsity,
};
use solver::{Plan, Solver};

/// The type in which the Hessian is factored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Precision {
    /// f32: half the time and memory.
    #[default]
    F32,
    /// f64, for Hessians that f32 finds not positive definite.
    F64,
}

/// Settings of [`sparsegpt`](sparsegpt()).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SparseGpt {
    /// What is pruned. [`Sparsity::Tensor`] compares the elements of all rows inside a block of columns, as the paper
    /// does; [`Sparsity::EachRow`] those of a row inside a block.
    pub sparsity: Sparsity,
    /// What is added to the Hessian's diagonal, as a share of its mean.
    pub damping: f64,
    /// Columns whose mask is chosen together by unstructured sparsity, and between which adjustments are GEMMs; rounded
    /// down to a multiple of `M`.
    pub block: usize,
    /// The type in which the Hessian is factored.
    pub precision: Precision,
}

impl SparseGpt {
    /// The paper's settings: damping 0.01, blocks of 128 columns.
    pub fn new(sparsity: Sparsity) -> Self {
        Self { sparsity, damping: 0.01, block: 128, precision: Precision::F32 }
    }
}

/// A pruned weight `[rows, cols]`; of [`round`](super::round()) one of integers.
#[derive(Debug, Clone, PartialEq)]
pub struct Solved {
    /// The adjusted weight, +0.0 where it is pruned; where it was rounded, its integers times their scales.
    pub weight: Vec<f32>,
    /// What is kept. A kept element may be zero.
    pub mask: Mask,
    /// Where it was rounded: the integers, `[rows, cols]`.
    pub integers: Option<Vec<i8>>,
    /// Where it was rounded: the scales, `[rows, cols / group, rounded up]`, each the value of an f16.
    pub scales: Option<Vec<f32>>,
    /// `‖(W - Ŵ)·X‖²`; of [`sparsegpt`] alone with the damped Hessian for `X·Xᵀ`. Over [`Hessian::squared_outputs`] of
    /// the dense weight it is the relative error of the layer.
    pub squared_error: f64,
}

/// Prunes a layer's weight `[rows, cols]` with the Hessian of its `cols` input features.
///
/// Input features that were zero on all of calibration are pruned in every row before anything else: their weights
/// become zero. Ties go to the lower index. The result is the same with any number of threads.
///
/// # Errors
/// [`Error::NotANumber`] or [`Error::Infinite`] with the place; [`Error::Length`] where the Hessian is of another
/// number of features; [`Error::NotPositiveDefinite`] where its factorization fails; [`Error::NoTokens`],
/// [`Error::Setting`], [`Error::SparsityLevel`]; [`Error::MethodPattern`] for blocks, rows, columns and V:N:M.
///
/// ```
/// use twofour::{MatrixRef, Pattern, calibration::Hessian, select::Sparsity, solve::{SparseGpt, sparsegpt}};
/// // Features 0 and 1 are always equal: one of them can stand for both.
/// let mut hessian = Hessian::new(4)?;
/// hessian.add(&[1.0, 1.0, 0.0, 2.0, -3.0, -3.0, 1.0, 0.0, 2.0, 2.0, 5.0, 1.0])?;
/// let w = [1.0f32, 1.0, 0.1, 3.0];
/// let solved = sparsegpt(MatrixRef::new(1, 4, &w)?, &hessian, &SparseGpt::new(Sparsity::Groups(Pattern::TWO_FOUR)))?;
/// assert_eq!(solved.mask.row_words(0), [0b1010]);
/// assert!((solved.weight[1] - 2.0).abs() < 0.05);
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn sparsegpt<T: Element>(matrix: MatrixRef<'_, T>, hessian: &Hessian, settings: &SparseGpt) -> Result<Solved> {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    let mut dense = finite_weight(matrix, hessian)?;
    let plan = Plan::new(settings)?;
    if rows == 0 || cols == 0 {
        let mask = Mask::empty(rows, cols);
        return Ok(Solved { weight: Vec::new(), mask, integers: None, scales: None, squared_error: 0.0 });
    }
    let factor: Vec<f32> = match settings.precision {
        Precision::F32 => hessian.upper_factor(settings.damping)?,
        Precision::F64 => {
            let factor = hessian.upper_factor::<f64>(settings.damping)?;
            factor.par_iter().map(|value| *value as f32).collect()
        }
    };
    for (col, _) in hessian.diagonal().iter().enumerate().filter(|(_, d)| **d == 0.0) {
        dense.iter_mut().skip(col).step_by(cols).for_each(|w| *w = 0.0);
    }
    let diagonal: Vec<f32> = factor.iter().step_by(cols + 1).copied().collect();
    Solver { rows, cols, plan, factor, diagonal }.run(dense)
}

/// SparseGPT by its name.
#[derive(Debug)]
pub(super) struct BySparseGpt;

impl Method for BySparseGpt {
    fn name(&self) -> &'static str {
        "sparsegpt"
    }

    fn about(&self) -> &'static str {
        "Keep what matters most to the layer's outputs and adjust it"
    }

    fn requires(&self) -> StatisticKind {
        StatisticKind::Hessian
    }

    fn patterns(&self) -> &'static str {
        "N:M, unstructured and unstructured-rows"
    }

    fn prunes_to(&self, sparsity: Sparsity) -> bool {
        matches!(sparsity, Sparsity::Groups(_) | Sparsity::EachRow(_) | Sparsity::Tensor(_))
    }

    fn prune(
        &self,
        _: &dyn Backend,
        weight: MatrixRef<'_, f32>,
        sparsity: Sparsity,
        inputs: Option<&Statistic>,
    ) -> Result<Pruned> {
        let hessian = hessian_of(inputs)?;
        let settings = SparseGpt::new(sparsity);
        let solved = match sparsegpt(weight, hessian, &settings) {
            Err(Error::NotPositiveDefinite { .. }) => {
                sparsegpt(weight, hessian, &SparseGpt { precision: Precision::F64, ..settings })?
            }
            solved => solved?,
        };
        Ok(Pruned::Solved(solved))
    }
}
