//! Products of what a layer has in two models.

use rayon::prelude::*;

use super::{reject_not_finite, tokens_of};
use crate::{
    Error, Result,
    linear_algebra::gemm::{Block, Operand, Threads, multiply},
};

/// `X₀ᵀX` over all tokens added: of the inputs `X₀` that a layer has in the dense model and the inputs `X` that it has
/// in the pruned one, for the same tokens; or `Y₀ᵀX`, of the layer's outputs in the dense model.
///
/// It takes `4 n²` bytes for `n` input features, or `4 m n` for `m` outputs. With the [`Hessian`](super::Hessian) of
/// `X` it says what a layer must do to come near its dense outputs from the inputs that it has:
/// [`compensated`](crate::solve::compensated).
#[derive(Debug, Clone, PartialEq)]
pub struct CrossProducts {
    of: DenseSide,
    features: usize,
    sums: Vec<f32>,
}

/// What the products are of in the dense model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DenseSide {
    /// The layer's inputs: they serve every weight that reads them.
    Inputs,
    /// The layer's outputs without its bias, so many features: fewer products, where there are fewer outputs.
    Outputs(usize),
}

impl CrossProducts {
    /// No tokens yet, of a layer with this many input features.
    ///
    /// # Errors
    /// [`Error::TooLarge`] where the element count overflows.
    pub fn new(of: DenseSide, features: usize) -> Result<Self> {
        let rows = if let DenseSide::Outputs(outputs) = of { outputs } else { features };
        let len = rows.checked_mul(features).ok_or_else(|| Error::TooLarge { shape: vec![rows, features] })?;
        Ok(Self { of, features, sums: vec![0.0; len] })
    }

    /// Products computed elsewhere, `[features of the dense side, features]`.
    ///
    /// # Errors
    /// [`Error::Length`] for another number of elements; [`Error::Statistic`] for one that is not finite.
    pub fn from_sums(of: DenseSide, features: usize, sums: Vec<f32>) -> Result<Self> {
        let rows = if let DenseSide::Outputs(outputs) = of { outputs } else { features };
        if rows.checked_mul(features) != Some(sums.len()) {
            let expected = rows.saturating_mul(features);
            return Err(Error::Length { what: "products of two models", expected, found: sums.len() });
        }
        match sums.par_iter().position_first(|value| !value.is_finite()) {
            None => Ok(Self { of, features, sums }),
            Some(index) => {
                let (what, value) = ("the products' element", f64::from(sums[index]));
                Err(Error::Statistic { what, index, value })
            }
        }
    }

    /// Adds what the same tokens have in the dense model, its inputs or outputs, and the inputs in the pruned model,
    /// `[tokens, features]`, row-major.
    ///
    /// # Errors
    /// [`Error::Length`] for batches of two numbers of tokens, [`Error::Multiple`] for ones that are not made of whole
    /// tokens, [`Error::Activation`] with the place of the first NaN or infinity.
    pub fn add(&mut self, dense: &[f32], pruned: &[f32]) -> Result<()> {
        let (n, rows) = (self.features, self.rows());
        let (tokens, found) = (tokens_of(pruned, n)?, tokens_of(dense, rows)?);
        if found != tokens {
            let what = "activations of the dense model";
            return Err(Error::Length { what, expected: tokens * rows, found: dense.len() });
        }
        reject_not_finite(dense, rows)?;
        reject_not_finite(pruned, n)?;
        let batch = Block { row: 0, col: 0, rows: tokens, cols: n };
        let left = Operand::new(dense, rows, Block { cols: rows, ..batch }).transposed();
        let right = Operand::new(pruned, n, batch);
        let all = Block { row: 0, col: 0, rows, cols: n };
        multiply((&mut self.sums, n, all), 1.0, 1.0, left, right, Threads::All);
        Ok(())
    }

    /// What the products are of in the dense model.
    pub fn dense_side(&self) -> DenseSide {
        self.of
    }

    /// Number of input features.
    pub fn features(&self) -> usize {
        self.features
    }

    /// The elements, `[features of the dense side, features]`, row-major.
    pub fn sums(&self) -> &[f32] {
        &self.sums
    }

    fn rows(&self) -> usize {
        if let DenseSide::Outputs(outputs) = self.of { outputs } else { self.features }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_add_up_and_bad_ones_leave_no_trace() {
        let dense = [1.0f32, 2.0, 3.0, -1.0, 0.5, 4.0];
        let pruned = [2.0f32, 0.0, 1.0, 1.0, -2.0, 3.0];
        let mut whole = CrossProducts::new(DenseSide::Inputs, 3).unwrap();
        whole.add(&dense, &pruned).unwrap();
        for (i, j) in (0..3).flat_map(|i| (0..3).map(move |j| (i, j))) {
            let expected: f32 = (0..2).map(|t| dense[3 * t + i] * pruned[3 * t + j]).sum();
            assert_eq!(whole.sums()[3 * i + j], expected, "{i} {j}");
        }
        let mut parts = CrossProducts::new(DenseSide::Inputs, 3).unwrap();
        parts.add(&dense[..3], &pruned[..3]).unwrap();
        parts.add(&dense[3..], &pruned[3..]).unwrap();
        assert_eq!(parts, whole);
        let computed = |sums: &[f32]| CrossProducts::from_sums(DenseSide::Inputs, 3, sums.to_vec());
        assert_eq!(computed(whole.sums()).unwrap(), whole);
        assert!(matches!(computed(&whole.sums()[1..]), Err(Error::Length { expected: 9, found: 8, .. })));
        let damaged = [&whole.sums()[..8], &[f32::NAN]].concat();
        assert!(matches!(computed(&damaged), Err(Error::Statistic { index: 8, .. })));
        assert!(parts.add(&dense, &pruned[..3]).is_err() && parts.add(&dense[..2], &pruned[..2]).is_err());
        assert!(matches!(parts.add(&[f32::NAN; 3], &[0.0; 3]), Err(Error::Activation { token: 0, feature: 0, .. })));
        assert!(matches!(parts.add(&[0.0; 3], &[0.0, f32::INFINITY, 0.0]), Err(Error::Activation { feature: 1, .. })));
        assert_eq!(parts, whole);
    }

    #[test]
    fn outputs_of_the_dense_model_have_rows_of_their_own() {
        let (outputs, pruned) = ([1.0f32, 2.0, 3.0, -1.0], [2.0f32, 0.0, 1.0, 1.0, -2.0, 3.0]);
        let mut products = CrossProducts::new(DenseSide::Outputs(2), 3).unwrap();
        products.add(&outputs, &pruned).unwrap();
        assert_eq!(products.sums(), [5.0, -6.0, 10.0, 3.0, 2.0, -1.0]);
        assert!(products.add(&outputs[..2], &pruned).is_err() && products.add(&outputs, &pruned[..3]).is_err());
    }
}
