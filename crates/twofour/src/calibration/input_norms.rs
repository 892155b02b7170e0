//! Norms of input features.

use rayon::prelude::*;

use super::{Hessian, reject_not_finite, tokens_of};
use crate::{Error, Result};

/// The sum of squares of each input feature of a layer, over all tokens added.
#[derive(Debug, Clone, PartialEq)]
pub struct InputNorms {
    sums: Vec<f64>,
    tokens: u64,
}

impl InputNorms {
    /// No tokens yet, of a layer with this many input features.
    pub fn new(features: usize) -> Self {
        Self { sums: vec![0.0; features], tokens: 0 }
    }

    /// What a [`Hessian`] knows of them: its diagonal, in f32.
    pub fn of_hessian(hessian: &Hessian) -> Self {
        Self { sums: hessian.diagonal().into_iter().map(f64::from).collect(), tokens: hessian.tokens() }
    }

    /// Adds a batch of activations `[tokens, features]`, row-major. Squares are added up in f64, token by token.
    ///
    /// # Errors
    /// [`Error::Multiple`] for a batch that is not made of whole tokens, [`Error::Activation`] with the place of the
    /// first NaN or infinity.
    pub fn add(&mut self, batch: &[f32]) -> Result<()> {
        const FEATURES: usize = 256;
        let features = self.sums.len();
        let tokens = tokens_of(batch, features)?;
        let mut sums = self.sums.clone();
        sums.par_chunks_mut(FEATURES).enumerate().for_each(|(chunk, sums)| {
            for token in batch.chunks_exact(features) {
                let values = &token[chunk * FEATURES..][..sums.len()];
                sums.iter_mut().zip(values).for_each(|(sum, v)| *sum += f64::from(*v) * f64::from(*v));
            }
        });
        // Squares of finite f32 do not overflow f64, nor do sums of fewer than 2⁷⁶⁷ of them.
        if !sums.iter().all(|sum| sum.is_finite()) {
            reject_not_finite(batch, features)?;
        }
        self.sums = sums;
        self.tokens += tokens as u64;
        Ok(())
    }

    /// Adds what another accumulator of the same layer has seen.
    ///
    /// # Errors
    /// [`Error::Length`] where it has another number of features.
    pub fn merge(&mut self, other: &InputNorms) -> Result<()> {
        let (expected, found) = (self.sums.len(), other.sums.len());
        if expected != found {
            return Err(Error::Length { what: "norms of input features", expected, found });
        }
        self.sums.iter_mut().zip(&other.sums).for_each(|(a, b)| *a += b);
        self.tokens += other.tokens;
        Ok(())
    }

    /// Number of input features.
    pub fn features(&self) -> usize {
        self.sums.len()
    }

    /// Tokens added.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// `Σ x²` of each feature.
    pub fn sums_of_squares(&self) -> &[f64] {
        &self.sums
    }

    /// `‖x‖₂` of each feature, rounded to f32.
    ///
    /// # Errors
    /// [`Error::NoTokens`] where no token was added; [`Error::Statistic`] for a norm beyond f32.
    pub fn l2(&self) -> Result<Vec<f32>> {
        if self.tokens == 0 {
            return Err(Error::NoTokens { what: "norms of input features" });
        }
        let norms: Vec<f32> = self.sums.iter().map(|sum| sum.sqrt() as f32).collect();
        match norms.iter().position(|norm| !norm.is_finite()) {
            None => Ok(norms),
            Some(index) => {
                Err(Error::Statistic { what: "the norm of input feature", index, value: f64::from(norms[index]) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_add_up_and_bad_ones_leave_no_trace() {
        let batch: Vec<f32> = (0..6 * 300).map(|i| (i % 17) as f32 - 8.0).collect();
        let mut whole = InputNorms::new(300);
        whole.add(&batch).unwrap();
        let (mut first, mut second) = (InputNorms::new(300), InputNorms::new(300));
        first.add(&batch[..600]).unwrap();
        second.add(&batch[600..]).unwrap();
        first.merge(&second).unwrap();
        assert_eq!(first, whole);
        assert_eq!(whole.tokens(), 6);
        let expected: f64 = (0..6).map(|t| f64::from(batch[t * 300 + 299]).powi(2)).sum();
        assert_eq!(whole.sums_of_squares()[299], expected);

        for (value, place) in [(f32::NAN, 301), (f32::INFINITY, 599)] {
            let mut bad = batch.clone();
            bad[place] = value;
            let error = first.add(&bad).unwrap_err();
            assert!(matches!(error, Error::Activation { token: 1, feature, .. } if feature == place - 300), "{error}");
            assert_eq!(first, whole);
        }
        assert!(matches!(first.add(&batch[1..]), Err(Error::Multiple { .. })));
        assert!(matches!(InputNorms::new(3).l2(), Err(Error::NoTokens { .. })));
        assert!(whole.merge(&InputNorms::new(2)).is_err());
        InputNorms::new(0).add(&[]).unwrap();
    }

    #[test]
    fn the_largest_activations_do_not_overflow() {
        let mut norms = InputNorms::new(1);
        norms.add(&[f32::MAX]).unwrap();
        assert_eq!(norms.l2().unwrap(), [f32::MAX]);
        norms.add(&[f32::MAX; 3]).unwrap();
        assert!(matches!(norms.l2(), Err(Error::Statistic { index: 0, .. })));
    }
}
