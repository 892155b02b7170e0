//! Any criterion as a rule.

use super::ParameterRule;
use crate::{
    Mask, MatrixRef, Result,
    criterion::{self, Criterion},
    select::Sparsity,
};

/// Prunes the share `level` of a whole weight by a criterion; levels outside of 0 to 1 count as the nearer of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unstructured<C>(pub C);

impl<C: Criterion + Send> ParameterRule for Unstructured<C> {
    fn mask(&self, weight: MatrixRef<'_, f32>, level: f64) -> Result<Mask> {
        criterion::mask(weight, &self.0, Sparsity::Tensor(level.clamp(0.0, 1.0)))
    }
}
