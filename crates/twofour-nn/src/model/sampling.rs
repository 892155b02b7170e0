//! Choosing the next token.

use serde::{Deserialize, Serialize};

use crate::{
    Error, Result,
    cpu::{softmax, vector},
    random::Stream,
};

/// How the next token is chosen from the model's scores.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Zero takes the most likely token; one samples from the model's own distribution; between, it is sharpened.
    pub temperature: f32,
    /// The same seed gives the same tokens.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 0.8, seed: 0 }
    }
}

impl Sampling {
    /// Checks the temperature.
    ///
    /// # Errors
    /// [`Error::Setting`] where it is negative or not a number.
    pub fn validate(&self) -> Result<()> {
        if self.temperature >= 0.0 && self.temperature.is_finite() {
            return Ok(());
        }
        let found = self.temperature.to_string();
        Err(Error::Setting { what: "temperature", found, expected: "a number from 0 up" })
    }

    /// Chooses a token by `logits` (destroyed); `index` counts the tokens chosen so far.
    ///
    /// # Errors
    /// Those of [`largest_score`].
    pub(crate) fn choose(&self, logits: &mut [f32], index: u64) -> Result<u32> {
        let max = largest_score(logits)?;
        // Below this the scaled logits could overflow, and the choice is certain long before.
        if self.temperature < 1e-4 {
            return Ok(logits.iter().position(|v| *v == max).unwrap_or(0) as u32);
        }
        logits.iter_mut().for_each(|v| *v = (*v - max) / self.temperature);
        softmax::in_place(logits);
        let mut left = Stream::new(self.seed, "sampling").uniform(index);
        for (token, &p) in logits.iter().enumerate() {
            left -= f64::from(p);
            if left < 0.0 {
                return Ok(token as u32);
            }
        }
        // The probabilities sum to one only up to rounding: what is left belongs to the last token that has any.
        Ok(logits.iter().rposition(|&p| p > 0.0).unwrap_or(0) as u32)
    }
}

/// The largest score. A token can be chosen only where none is NaN and the largest is finite.
///
/// # Errors
/// [`Error::NotFinite`] elsewhere.
pub(crate) fn largest_score(logits: &[f32]) -> Result<f32> {
    let largest = vector::widest(|| vector::max(logits));
    match largest.is_finite() && !logits.iter().any(|v| v.is_nan()) {
        true => Ok(largest),
        false => Err(Error::NotFinite { what: "the next token" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temperature_zero_takes_the_best_and_the_lower_of_equals() {
        let greedy = Sampling { temperature: 0.0, seed: 3 };
        assert_eq!(greedy.choose(&mut [0.0, 2.0, 2.0, 1.0], 0).unwrap(), 1);
        assert_eq!(greedy.choose(&mut [-5.0], 0).unwrap(), 0);
    }

    #[test]
    fn no_token_is_chosen_by_scores_that_are_not_finite() {
        for temperature in [0.0, 1.0] {
            let sampling = Sampling { temperature, seed: 0 };
            for scores in [[f32::NAN, 1.0], [1.0, f32::NAN], [f32::INFINITY, 0.0], [f32::NEG_INFINITY; 2]] {
                assert!(sampling.choose(&mut scores.clone(), 0).is_err(), "{scores:?}");
            }
            assert_eq!(sampling.choose(&mut [f32::NEG_INFINITY, 0.0], 0).unwrap(), 1);
        }
    }

    #[test]
    fn frequencies_follow_the_distribution() {
        let sampling = Sampling { temperature: 2.0, seed: 4 };
        let logits = [2.0 * 0.5f32.ln(), 2.0 * 0.3f32.ln(), 2.0 * 0.2f32.ln(), f32::NEG_INFINITY];
        let mut counts = [0f32; 4];
        for index in 0..20_000 {
            counts[sampling.choose(&mut logits.clone(), index).unwrap() as usize] += 1.0 / 20_000.0;
        }
        for (found, expected) in counts.iter().zip([0.5, 0.3, 0.2, 0.0]) {
            assert!((found - expected).abs() < 0.015, "{counts:?}");
        }
    }

    #[test]
    fn bad_temperatures_are_refused() {
        for temperature in [-1.0, f32::NAN, f32::INFINITY] {
            assert!(Sampling { temperature, seed: 0 }.validate().is_err());
        }
    }
}
