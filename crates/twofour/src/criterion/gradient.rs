//! Criteria that require gradients.

use rayon::prelude::*;

use super::{Criterion, Scorer, Weight, expect_length};
use crate::{Error, MatrixRef, Result};

/// Scores an element by `|w · g|`, the first-order estimate of how much the loss changes when it is pruned (Molchanov
/// et al., ICLR 2017; SNIP, Lee et al., ICLR 2019).
#[derive(Debug, Clone, Copy)]
pub struct Saliency<'a> {
    /// The gradient of the loss, `[rows, cols]`, row-major; for several batches their sum.
    pub gradient: &'a [f32],
}

impl Criterion for Saliency<'_> {
    fn scorer<'a>(&'a self, weight: &Weight<'a>) -> Result<Scorer<'a>> {
        let cols = weight.cols();
        expect_length("gradient", weight.rows() * cols, self.gradient.len())?;
        Ok(Box::new(move |row, weights, scores| {
            let gradients = &self.gradient[row * cols..][..cols];
            for ((out, w), g) in scores.iter_mut().zip(weights).zip(gradients) {
                *out = (w * g).abs();
            }
        }))
    }
}

/// Scores an element by how far fine-tuning moves it away from zero: `-Σ w · g` over steps (movement pruning, Sanh et
/// al., NeurIPS 2020).
///
/// It has the size of the weight: [`Movement::add`] is called after every backward pass.
#[derive(Debug, Clone)]
pub struct Movement {
    rows: usize,
    cols: usize,
    sums: Vec<f32>,
}

impl Movement {
    /// Zero movement of a weight `[rows, cols]`.
    ///
    /// # Errors
    /// [`Error::TooLarge`] where the element count overflows.
    pub fn new(rows: usize, cols: usize) -> Result<Self> {
        let len = rows.checked_mul(cols).ok_or_else(|| Error::TooLarge { shape: vec![rows, cols] })?;
        Ok(Self { rows, cols, sums: vec![0.0; len] })
    }

    /// Adds a step: the weight before it and the loss's gradient.
    ///
    /// # Errors
    /// [`Error::Shape`] where either has another shape.
    pub fn add(&mut self, weight: MatrixRef<'_, f32>, gradient: MatrixRef<'_, f32>) -> Result<()> {
        for (what, matrix) in [("weight", weight), ("gradient", gradient)] {
            let found = (matrix.rows(), matrix.cols());
            if found != (self.rows, self.cols) {
                return Err(Error::Shape { what, expected: (self.rows, self.cols), found });
            }
        }
        let elements = self.sums.par_iter_mut().zip(weight.data()).zip(gradient.data());
        elements.for_each(|((sum, w), g)| *sum -= w * g);
        Ok(())
    }

    /// The scores so far, row-major.
    pub fn scores(&self) -> &[f32] {
        &self.sums
    }
}

impl Criterion for Movement {
    fn scorer<'a>(&'a self, weight: &Weight<'a>) -> Result<Scorer<'a>> {
        let (expected, found) = ((self.rows, self.cols), (weight.rows(), weight.cols()));
        if expected != found {
            return Err(Error::Shape { what: "weight", expected, found });
        }
        Ok(Box::new(|row, _, scores| scores.copy_from_slice(&self.sums[row * self.cols..][..self.cols])))
    }
}
