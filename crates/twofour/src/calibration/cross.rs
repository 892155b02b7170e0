//! Products of a layer's inputs in two models.

use super::{reject_not_finite, tokens_of};
use crate::{
    Error, Result,
    kernel::float_gemm::{Block, Operand, Threads, multiply},
};

/// `X₀ᵀX` over all tokens added: of the inputs `X₀` that a layer has in the dense model and the inputs `X` that it has
/// in the pruned one, for the same tokens.
///
/// It takes `4 n²` bytes for `n` input features. With the [`Hessian`](super::Hessian) of `X` it says what a layer must
/// do to come near its dense outputs from the inputs that it has: [`compensated`](crate::solve::compensated).
#[derive(Debug, Clone, PartialEq)]
pub struct CrossProducts {
    features: usize,
    sums: Vec<f32>,
}

impl CrossProducts {
    /// No tokens yet, of a layer with this many input features.
    ///
    /// # Errors
    /// [`Error::TooLarge`] where the element count overflows.
    pub fn new(features: usize) -> Result<Self> {
        let len = features.checked_mul(features).ok_or_else(|| Error::TooLarge { shape: vec![features; 2] })?;
        Ok(Self { features, sums: vec![0.0; len] })
    }

    /// Adds the inputs of the same tokens in the dense and in the pruned model, `[tokens, features]`, row-major.
    ///
    /// # Errors
    /// [`Error::Length`] for batches of two lengths, [`Error::Multiple`] for ones that are not made of whole tokens,
    /// [`Error::Activation`] with the place of the first NaN or infinity.
    pub fn add(&mut self, dense: &[f32], pruned: &[f32]) -> Result<()> {
        let n = self.features;
        if dense.len() != pruned.len() {
            let what = "activations of the dense model";
            return Err(Error::Length { what, expected: pruned.len(), found: dense.len() });
        }
        let tokens = tokens_of(dense, n)?;
        reject_not_finite(dense, n)?;
        reject_not_finite(pruned, n)?;
        let (whole, batch) =
            (Block { row: 0, col: 0, rows: n, cols: n }, Block { row: 0, col: 0, rows: tokens, cols: n });
        let (left, right) = (Operand::new(dense, n, batch).transposed(), Operand::new(pruned, n, batch));
        multiply((&mut self.sums, n, whole), 1.0, 1.0, left, right, Threads::All);
        Ok(())
    }

    /// Number of input features.
    pub fn features(&self) -> usize {
        self.features
    }

    /// The elements, `[features, features]`, row-major: a row for each feature in the dense model.
    pub fn sums(&self) -> &[f32] {
        &self.sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_add_up_and_bad_ones_leave_no_trace() {
        let dense = [1.0f32, 2.0, 3.0, -1.0, 0.5, 4.0];
        let pruned = [2.0f32, 0.0, 1.0, 1.0, -2.0, 3.0];
        let mut whole = CrossProducts::new(3).unwrap();
        whole.add(&dense, &pruned).unwrap();
        for (i, j) in (0..3).flat_map(|i| (0..3).map(move |j| (i, j))) {
            let expected: f32 = (0..2).map(|t| dense[3 * t + i] * pruned[3 * t + j]).sum();
            assert_eq!(whole.sums()[3 * i + j], expected, "{i} {j}");
        }
        let mut parts = CrossProducts::new(3).unwrap();
        parts.add(&dense[..3], &pruned[..3]).unwrap();
        parts.add(&dense[3..], &pruned[3..]).unwrap();
        assert_eq!(parts, whole);
        assert!(parts.add(&dense, &pruned[..3]).is_err() && parts.add(&dense[..2], &pruned[..2]).is_err());
        assert!(matches!(parts.add(&[f32::NAN; 3], &[0.0; 3]), Err(Error::Activation { token: 0, feature: 0, .. })));
        assert!(matches!(parts.add(&[0.0; 3], &[0.0, f32::INFINITY, 0.0]), Err(Error::Activation { feature: 1, .. })));
        assert_eq!(parts, whole);
    }
}
