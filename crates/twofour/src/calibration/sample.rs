//! A few of a layer's inputs, to compare weights by their outputs.

use rayon::prelude::*;

use super::{reject_not_finite, tokens_of};
use crate::{
    Error, MatrixRef, Result,
    linear_algebra::gemm::{Block, Operand, Threads, multiply},
};

/// Activations `[tokens, features]` of a layer's inputs, as they are: for the error of a pruned weight without a
/// [`Hessian`](super::Hessian).
#[derive(Debug, Clone, PartialEq)]
pub struct ActivationSample {
    features: usize,
    activations: Vec<f32>,
}

impl ActivationSample {
    /// No tokens yet, of a layer with this many input features.
    pub fn new(features: usize) -> Self {
        Self { features, activations: Vec::new() }
    }

    /// Adds a batch `[tokens, features]`, row-major.
    ///
    /// # Errors
    /// [`Error::Multiple`] for a batch that is not made of whole tokens, [`Error::Activation`] with the place of the
    /// first NaN or infinity.
    pub fn add(&mut self, batch: &[f32]) -> Result<()> {
        tokens_of(batch, self.features)?;
        reject_not_finite(batch, self.features)?;
        self.activations.extend_from_slice(batch);
        Ok(())
    }

    /// Tokens added.
    pub fn tokens(&self) -> usize {
        self.activations.len().checked_div(self.features).unwrap_or(0)
    }

    /// `‖(W - Ŵ)·X‖² / ‖W·X‖²` for a dense weight `[rows, features]` and what it was pruned to; 0 where the dense
    /// weight's outputs are zero.
    ///
    /// # Errors
    /// [`Error::Length`] where the dense weight has another number of columns, [`Error::Shape`] where the pruned one
    /// has another shape.
    pub fn relative_error(&self, dense: MatrixRef<'_, f32>, pruned: MatrixRef<'_, f32>) -> Result<f64> {
        const ROWS: usize = 64;
        let (n, tokens) = (self.features, self.tokens());
        if dense.cols() != n {
            return Err(Error::Length { what: "columns of the weight", expected: n, found: dense.cols() });
        }
        let (expected, found) = ((dense.rows(), n), (pruned.rows(), pruned.cols()));
        if expected != found {
            return Err(Error::Shape { what: "pruned weight", expected, found });
        }
        if n == 0 || tokens == 0 {
            return Ok(0.0);
        }
        let bands = dense.data().par_chunks(ROWS * n).zip(pruned.data().par_chunks(ROWS * n)).map(|(dense, pruned)| {
            let rows = dense.len() / n;
            let squared = |weight: &[f32]| {
                let mut out = vec![0f32; rows * tokens];
                multiply(
                    (&mut out, tokens, Block { row: 0, col: 0, rows, cols: tokens }),
                    0.0,
                    1.0,
                    Operand::new(weight, n, Block { row: 0, col: 0, rows, cols: n }),
                    Operand::new(&self.activations, n, Block { row: 0, col: 0, rows: tokens, cols: n }).transposed(),
                    Threads::One,
                );
                out.iter().map(|y| f64::from(*y) * f64::from(*y)).sum::<f64>()
            };
            let change: Vec<f32> = dense.iter().zip(pruned).map(|(a, b)| a - b).collect();
            (squared(&change), squared(dense))
        });
        // Collected, so that the sums do not depend on the threads.
        let bands: Vec<(f64, f64)> = bands.collect();
        let (error, energy) = bands.into_iter().fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
        Ok(if energy > 0.0 { error / energy } else { 0.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_those_of_the_outputs() {
        let mut sample = ActivationSample::new(3);
        sample.add(&[1.0, 2.0, 0.0]).unwrap();
        sample.add(&[0.0, 1.0, -1.0]).unwrap();
        let (dense, pruned) = ([1f32, 1.0, 2.0, 0.0, 3.0, 1.0], [1f32, 0.0, 2.0, 0.0, 3.0, 0.0]);
        let of = |data| MatrixRef::new(2, 3, data).unwrap();
        // Outputs 3, -1, 6, 2; changes 2, 1, 0, -1.
        assert_eq!(sample.relative_error(of(&dense), of(&pruned)).unwrap(), 6.0 / 50.0);
        assert_eq!(sample.relative_error(of(&dense), of(&dense)).unwrap(), 0.0);
        assert!(sample.relative_error(MatrixRef::new(3, 2, &dense).unwrap(), of(&pruned)).is_err());
        assert!(sample.relative_error(of(&dense), MatrixRef::new(3, 2, &pruned).unwrap()).is_err());
        assert!(sample.add(&[f32::NAN; 3]).is_err() && sample.tokens() == 2);
        assert_eq!(ActivationSample::new(0).tokens(), 0);
    }
}
