//! The Hessian of a layer's squared output error.

use rayon::prelude::*;

use super::{reject_not_finite, tokens_of};
use crate::{
    Error, MatrixRef, Result,
    linear_algebra::{
        factor,
        gemm::{Block, Float, Operand, Threads, multiply},
    },
};

/// Columns of the Hessian that one GEMM computes.
const STRIP: usize = 512;

/// `XᵀX` over all tokens added: up to a factor the Hessian of `‖W·x - Ŵ·x‖²` in a row of `Ŵ`, for a layer with `n`
/// input features.
///
/// It takes `4 n²` bytes. One half is computed: it is symmetric.
#[derive(Debug, Clone, PartialEq)]
pub struct Hessian {
    features: usize,
    tokens: u64,
    /// `[features, features]`; below the diagonal it is valid.
    sums: Vec<f32>,
}

impl Hessian {
    /// No tokens yet, of a layer with this many input features.
    ///
    /// # Errors
    /// [`Error::TooLarge`] where the element count overflows.
    pub fn new(features: usize) -> Result<Self> {
        let len = features.checked_mul(features).ok_or_else(|| Error::TooLarge { shape: vec![features; 2] })?;
        Ok(Self { features, tokens: 0, sums: vec![0.0; len] })
    }

    /// A Hessian computed elsewhere, `[features, features]`, from so many tokens. Its elements on and below the
    /// diagonal are used.
    ///
    /// # Errors
    /// [`Error::Length`] for another number of elements; [`Error::Statistic`] for one that is not finite or a diagonal
    /// that is negative.
    pub fn from_matrix(features: usize, matrix: Vec<f32>, tokens: u64) -> Result<Self> {
        if features.checked_mul(features) != Some(matrix.len()) {
            let expected = features.saturating_mul(features);
            return Err(Error::Length { what: "Hessian", expected, found: matrix.len() });
        }
        for (row, values) in matrix.chunks(features.max(1)).enumerate() {
            let bad = values[..=row].iter().position(|v| !v.is_finite());
            let bad = bad.or_else(|| (values[row] < 0.0).then_some(row));
            if let Some(col) = bad {
                let (what, index) = ("the Hessian's element", row * features + col);
                return Err(Error::Statistic { what, index, value: f64::from(values[col]) });
            }
        }
        Ok(Self { features, tokens, sums: matrix })
    }

    /// Adds a batch of activations `[tokens, features]`, row-major.
    ///
    /// # Errors
    /// [`Error::Multiple`] for a batch that is not made of whole tokens, [`Error::Activation`] with the place of the
    /// first NaN or infinity.
    pub fn add(&mut self, batch: &[f32]) -> Result<()> {
        let n = self.features;
        let tokens = tokens_of(batch, n)?;
        reject_not_finite(batch, n)?;
        for col in (0..n).step_by(STRIP) {
            let cols = STRIP.min(n - col);
            let below = Block { row: 0, col, rows: tokens, cols: n - col };
            let here = Block { row: 0, col, rows: tokens, cols };
            multiply(
                (&mut self.sums, n, Block { row: col, col, rows: n - col, cols }),
                1.0,
                1.0,
                Operand::new(batch, n, below).transposed(),
                Operand::new(batch, n, here),
                Threads::All,
            );
        }
        self.tokens += tokens as u64;
        Ok(())
    }

    /// Number of input features.
    pub fn features(&self) -> usize {
        self.features
    }

    /// Tokens added.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The elements, `[features, features]`, row-major; those above the diagonal are unspecified.
    pub fn lower(&self) -> &[f32] {
        &self.sums
    }

    /// All elements, `[features, features]`, row-major: both halves.
    pub fn symmetric(&self) -> Vec<f32> {
        /// Rows and columns of the squares that are read and written together, so that both are in the cache.
        const SIDE: usize = 32;
        let n = self.features;
        let mut values = self.sums.clone();
        values.par_chunks_mut((SIDE * n).max(1)).enumerate().for_each(|(band, rows)| {
            let first = band * SIDE;
            for begin in (first..n).step_by(SIDE) {
                let end = (begin + SIDE).min(n);
                for (i, row) in rows.chunks_mut(n).enumerate() {
                    let own = (first + i + 1).clamp(begin, end)..end;
                    let column = self.sums[own.start * n..].iter().skip(first + i).step_by(n);
                    row[own].iter_mut().zip(column).for_each(|(value, below)| *value = *below);
                }
            }
        });
        values
    }

    /// `Σ x²` of each feature.
    pub fn diagonal(&self) -> Vec<f32> {
        self.sums.iter().step_by(self.features + 1).copied().collect()
    }

    /// The Hessian of the same features in another order: feature `order[j]` comes to place `j`.
    ///
    /// # Errors
    /// [`Error::Length`] for an order of another length, [`Error::Setting`] for a place that no feature has.
    pub fn reordered(&self, order: &[usize]) -> Result<Self> {
        let n = self.features;
        if order.len() != n {
            return Err(Error::Length { what: "places of an order", expected: n, found: order.len() });
        }
        if let Some(place) = order.iter().find(|place| **place >= n) {
            let (what, expected) = ("a place of an order", "below the number of features");
            return Err(Error::Setting { what, value: *place as f64, expected });
        }
        let mut sums = vec![0f32; n * n];
        sums.par_chunks_mut(n.max(1)).zip(order).enumerate().for_each(|(i, (row, a))| {
            row.iter_mut().zip(&order[..=i]).for_each(|(sum, b)| *sum = self.sums[a.max(b) * n + a.min(b)]);
        });
        Ok(Self { features: n, tokens: self.tokens, sums })
    }

    /// `‖W·X‖²`: the squared norm of the outputs on all tokens added of a layer with the weight `[rows, features]`. Of
    /// the difference of two weights it is the squared error of one for the other.
    ///
    /// # Errors
    /// [`Error::Length`] where the weight has another number of columns.
    pub fn squared_outputs(&self, weight: MatrixRef<'_, f32>) -> Result<f64> {
        const ROWS: usize = 256;
        let (n, rows) = (self.features, weight.rows());
        if weight.cols() != n {
            return Err(Error::Length { what: "columns of the weight", expected: n, found: weight.cols() });
        }
        let mut total = 0f64;
        // wᵀHw is twice that of the lower half with half the diagonal.
        for col in (0..n).step_by(STRIP) {
            let cols = STRIP.min(n - col);
            let mut strip: Vec<f32> = (col..n).flat_map(|row| self.sums[row * n + col..][..cols].to_vec()).collect();
            for (i, row) in strip.chunks_mut(cols).take(cols).enumerate() {
                row[i] *= 0.5;
                row[i + 1..].fill(0.0);
            }
            let bands = weight.data().par_chunks(ROWS * n).map(|band| {
                let rows = band.len() / n;
                let mut product = vec![0f32; rows * cols];
                multiply(
                    (&mut product, cols, Block { row: 0, col: 0, rows, cols }),
                    0.0,
                    1.0,
                    Operand::new(band, n, Block { row: 0, col, rows, cols: n - col }),
                    Operand::new(&strip, cols, Block { row: 0, col: 0, rows: n - col, cols }),
                    Threads::One,
                );
                let rows = product.chunks(cols).zip(band.chunks(n));
                rows.flat_map(|(p, w)| p.iter().zip(&w[col..])).map(|(p, w)| f64::from(*p) * f64::from(*w)).sum::<f64>()
            });
            // Collected, so that the sum does not depend on the threads.
            total += 2.0 * if rows == 0 { 0.0 } else { bands.collect::<Vec<f64>>().iter().sum() };
        }
        Ok(total.max(0.0))
    }

    /// The diagonal of the inverse, after `damping` times the mean of the diagonal was added to each of its elements;
    /// computed in f64. A feature that was always zero counts with that mean.
    ///
    /// # Errors
    /// [`Error::NoTokens`], [`Error::Setting`] for a damping that is not positive and finite,
    /// [`Error::NotPositiveDefinite`].
    pub fn inverse_diagonal(&self, damping: f64) -> Result<Vec<f32>> {
        let upper = self.upper_factor::<f64>(damping)?;
        Ok(factor::inverse_diagonal(&upper, self.features))
    }

    /// `R` of [`factor::upper`]: `H + damping · mean(diagonal) · I = R·Rᵀ`.
    ///
    /// # Errors
    /// [`Error::NoTokens`], [`Error::Setting`] for a damping that is negative or not finite,
    /// [`Error::NotPositiveDefinite`].
    pub(crate) fn upper_factor<T: Float>(&self, damping: f64) -> Result<Vec<T>> {
        if self.tokens() == 0 {
            return Err(Error::NoTokens { what: "Hessian" });
        }
        if !damping.is_finite() || damping < 0.0 {
            return Err(Error::Setting {
                what: "the Hessian's damping",
                value: damping,
                expected: "finite and not negative",
            });
        }
        factor::upper(self.lower(), self.features, damping)
            .map_err(|feature| Error::NotPositiveDefinite { feature, damping })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_half_is_that_of_the_product() {
        for n in [1usize, 5, 513, 700] {
            let tokens = 7;
            let batch: Vec<f32> = (0..tokens * n).map(|i| ((i * 31 % 23) as f32 - 11.0) * 0.5).collect();
            let mut hessian = Hessian::new(n).unwrap();
            hessian.add(&batch[..2 * n]).unwrap();
            hessian.add(&batch[2 * n..]).unwrap();
            assert_eq!(hessian.tokens(), 7);
            for i in (0..n).step_by(n / 5 + 1) {
                for j in 0..=i {
                    // Quarters of integers add up exactly.
                    let expected: f32 = (0..tokens).map(|t| batch[t * n + i] * batch[t * n + j]).sum();
                    assert_eq!(hessian.lower()[i * n + j], expected, "{n}: {i} {j}");
                }
            }
            let before = hessian.clone();
            let mut bad = batch.clone();
            bad[n] = f32::NEG_INFINITY;
            assert!(matches!(hessian.add(&bad), Err(Error::Activation { token: 1, feature: 0, .. })));
            assert_eq!(hessian, before);
        }
        assert!(Hessian::from_matrix(2, vec![1.0; 3], 1).is_err());
        assert!(Hessian::from_matrix(2, vec![1.0, f32::NAN, 0.0, 1.0], 1).is_ok());
        assert!(Hessian::from_matrix(2, vec![1.0, 0.0, f32::NAN, 1.0], 1).is_err());
        assert!(Hessian::from_matrix(2, vec![-1.0, 0.0, 0.0, 1.0], 1).is_err());
    }

    #[test]
    fn outputs_by_the_hessian_are_those_of_the_layer() {
        for n in [1usize, 5, 513, 700] {
            let (tokens, rows) = (3, 300);
            let value = |i: usize| ((i * 29 % 19) as f32 - 9.0) * 0.25;
            let batch: Vec<f32> = (0..tokens * n).map(value).collect();
            let weight: Vec<f32> = (0..rows * n).map(|i| value(i + 5)).collect();
            let mut hessian = Hessian::new(n).unwrap();
            hessian.add(&batch).unwrap();
            let outputs = weight
                .chunks(n)
                .flat_map(|w| batch.chunks(n).map(|x| w.iter().zip(x).map(|(a, b)| f64::from(a * b)).sum::<f64>()));
            let expected: f64 = outputs.map(|y| y * y).sum();
            let found = hessian.squared_outputs(MatrixRef::new(rows, n, &weight).unwrap()).unwrap();
            assert!((found - expected).abs() <= 1e-5 * expected, "{n}: {found} {expected}");
        }
        assert!(Hessian::new(2).unwrap().squared_outputs(MatrixRef::new(1, 3, &[0.0; 3]).unwrap()).is_err());
    }

    #[test]
    fn in_another_order_it_is_that_of_the_ordered_inputs() {
        let (n, tokens) = (5, 4);
        let batch: Vec<f32> = (0..tokens * n).map(|i| ((i * 31 % 23) as f32 - 11.0) * 0.5).collect();
        let order = [3, 0, 4, 1, 2];
        let ordered: Vec<f32> = batch.chunks(n).flat_map(|x| order.map(|j| x[j])).collect();
        let [mut plain, mut expected] = [Hessian::new(n).unwrap(), Hessian::new(n).unwrap()];
        plain.add(&batch).unwrap();
        expected.add(&ordered).unwrap();
        let found = plain.reordered(&order).unwrap();
        for (i, j) in (0..n).flat_map(|i| (0..=i).map(move |j| (i, j))) {
            assert_eq!(found.lower()[i * n + j], expected.lower()[i * n + j], "{i} {j}");
        }
        assert!(plain.reordered(&[0, 1]).is_err() && plain.reordered(&[0, 1, 2, 3, 5]).is_err());
    }

    #[test]
    fn the_upper_half_is_that_of_the_lower() {
        for n in [1usize, 31, 32, 33, 70] {
            let values: Vec<f32> = (0..n * n).map(|i| if i % n <= i / n { i as f32 } else { -1.0 }).collect();
            let all = Hessian::from_matrix(n, values.clone(), 1).unwrap().symmetric();
            assert!((0..n * n).all(|i| all[i] == values[(i / n).max(i % n) * n + (i / n).min(i % n)]), "{n}");
        }
    }

    #[test]
    fn the_inverse_of_a_small_hessian() {
        // [[2, 1], [1, 2]] with damping 0.5 · 2: [[3, 1], [1, 3]], whose inverse has 3/8 on the diagonal.
        let hessian = Hessian::from_matrix(2, vec![2.0, 0.0, 1.0, 2.0], 1).unwrap();
        let diagonal = hessian.inverse_diagonal(0.5).unwrap();
        assert!(diagonal.iter().all(|d| (d - 0.375).abs() < 1e-6), "{diagonal:?}");
    }
}
