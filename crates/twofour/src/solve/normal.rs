//! The equations that solvers share: a layer's damped Hessian, whole, and products with it.

use rayon::prelude::*;

use crate::{
    Element, Error, MatrixRef, Result,
    calibration::Hessian,
    first_error::first_error,
    linear_algebra::gemm::{Block, Operand, Threads, multiply},
};

/// A damped Hessian `H + damping · mean(diagonal) · I`, symmetric, `[features, features]`. A feature that was always
/// zero has that mean of the others on its diagonal.
#[derive(Debug)]
pub(super) struct Damped {
    features: usize,
    values: Vec<f32>,
}

impl Damped {
    pub(super) fn new(hessian: &Hessian, damping: f64) -> Result<Self> {
        if hessian.tokens() == 0 {
            return Err(Error::NoTokens { what: "Hessian" });
        }
        if !damping.is_finite() || damping < 0.0 {
            let expected = "finite and not negative";
            return Err(Error::Setting { what: "the Hessian's damping", value: damping, expected });
        }
        let (features, diagonal) = (hessian.features(), hessian.diagonal());
        let live = diagonal.iter().filter(|d| **d > 0.0).count();
        let mean = diagonal.iter().map(|d| f64::from(*d)).sum::<f64>() / live.max(1) as f64;
        let mean = if mean > 0.0 { mean } else { 1.0 };
        let mut values = hessian.symmetric();
        for (value, d) in values.iter_mut().step_by(features + 1).zip(&diagonal) {
            let d = f64::from(*d);
            *value = (if d > 0.0 { d } else { mean } + damping * mean) as f32;
        }
        Ok(Self { features, values })
    }

    pub(super) fn features(&self) -> usize {
        self.features
    }

    pub(super) fn row(&self, feature: usize) -> &[f32] {
        &self.values[feature * self.features..][..self.features]
    }

    pub(super) fn diagonal(&self) -> impl Iterator<Item = f32> + '_ {
        self.values.iter().step_by(self.features + 1).copied()
    }

    /// All elements; what a solver makes of them is its own.
    pub(super) fn into_values(self) -> Vec<f32> {
        self.values
    }

    /// `x · H` for rows `x: [rows, features]`.
    pub(super) fn product(&self, x: &[f32], out: &mut [f32]) {
        product(x, &self.values, self.features, out);
    }
}

/// `x · square` for rows `x: [rows, n]` and a matrix `[n, n]`.
pub(super) fn product(x: &[f32], square: &[f32], n: usize, out: &mut [f32]) {
    let whole = Block { row: 0, col: 0, rows: n, cols: n };
    let rows = Block { rows: x.len() / n.max(1), ..whole };
    multiply((out, n, rows), 0.0, 1.0, Operand::new(x, n, rows), Operand::new(square, n, whole), Threads::All);
}

/// The weight in f32; an error with the place of the first element that is not finite, or where the Hessian is of
/// another number of features.
pub(super) fn finite_weight<T: Element>(matrix: MatrixRef<'_, T>, hessian: &Hessian) -> Result<Vec<f32>> {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    if hessian.features() != cols {
        return Err(Error::Length { what: "input features of the Hessian", expected: cols, found: hessian.features() });
    }
    let mut dense = vec![0f32; rows * cols];
    first_error(dense.par_chunks_mut(cols.max(1)).enumerate(), |(row, out)| {
        for (col, (out, value)) in out.iter_mut().zip(matrix.row(row)).enumerate() {
            *out = value.to_f32();
            if !out.is_finite() {
                return Err(if out.is_nan() { Error::NotANumber { row, col } } else { Error::Infinite { row, col } });
            }
        }
        Ok(())
    })?;
    Ok(dense)
}
