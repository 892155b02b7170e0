//! Logistic regression with several classes: the usual judge of a model's features.
//!
//! ```
//! use twofour_nn::logistic::{LogisticRegression, Samples};
//! let samples = Samples::new(&[0.0, 1.0, 5.0, 6.0], &[0, 0, 1, 1], 1, 2)?;
//! let fitted = LogisticRegression::fit(&samples, 1.0)?;
//! assert_eq!(fitted.accuracy(&samples), 1.0);
//! # Ok::<(), twofour_nn::Error>(())
//! ```

mod lbfgs;

use rayon::prelude::*;

use crate::{Error, Result};

/// Samples of a pass that one task sums: fixed, so that sums do not depend on the number of threads.
const CHUNK: usize = 256;

/// The most iterations of the solver.
const MAX_ITERATIONS: usize = 300;

/// The largest derivative at the solution.
const TOLERANCE: f64 = 1e-5;

/// Features of samples, `[samples, width]`, with the class of each.
#[derive(Debug, Clone, Copy)]
pub struct Samples<'a> {
    features: &'a [f32],
    labels: &'a [u32],
    width: usize,
    classes: usize,
}

impl<'a> Samples<'a> {
    /// Samples with `width` features each, and labels from 0 to `classes` - 1.
    ///
    /// # Errors
    /// [`Error::Operation`] for features that are not `width` a label; [`Error::Setting`] without samples, features or
    /// classes, or with a feature that is NaN or infinite; [`Error::Operation`] for a label beyond the classes.
    pub fn new(features: &'a [f32], labels: &'a [u32], width: usize, classes: usize) -> Result<Self> {
        if width == 0 || labels.is_empty() || classes == 0 {
            let found = format!("{} samples of {width} features and {classes} classes", labels.len());
            return Err(Error::Setting { what: "samples of a regression", found, expected: "at least one of each" });
        }
        let expected = labels.len().saturating_mul(width);
        if features.len() != expected {
            return Err(Error::length("features", expected, features.len()));
        }
        if let Some((position, &token)) = labels.iter().enumerate().find(|(_, label)| **label as usize >= classes) {
            return Err(Error::token("labels", token, position, classes));
        }
        if let Some((at, value)) = features.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            let found = format!("{value} as feature {} of sample {}", at % width, at / width);
            return Err(Error::Setting { what: "features", found, expected: "finite numbers" });
        }
        Ok(Samples { features, labels, width, classes })
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are none, which [`Samples::new`] refuses.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Chunks of features with their labels.
    fn chunks(&self) -> impl IndexedParallelIterator<Item = (&'a [f32], &'a [u32])> {
        self.features.par_chunks(CHUNK * self.width).zip(self.labels.par_chunks(CHUNK))
    }

    /// Mean and deviation of each feature; a deviation of zero counts as one.
    fn moments(&self) -> (Vec<f64>, Vec<f64>) {
        let count = self.len() as f64;
        let mut mean = vec![0f64; self.width];
        for sample in self.features.chunks_exact(self.width) {
            mean.iter_mut().zip(sample).for_each(|(sum, value)| *sum += f64::from(*value));
        }
        mean.iter_mut().for_each(|sum| *sum /= count);
        let mut deviation = vec![0f64; self.width];
        for sample in self.features.chunks_exact(self.width) {
            for ((sum, value), mean) in deviation.iter_mut().zip(sample).zip(&mean) {
                *sum += (f64::from(*value) - mean).powi(2);
            }
        }
        for sum in &mut deviation {
            let found = (*sum / count).sqrt();
            *sum = if found > 0.0 { found } else { 1.0 };
        }
        (mean, deviation)
    }
}

/// A fitted regression.
#[derive(Debug, Clone, PartialEq)]
pub struct LogisticRegression {
    classes: usize,
    mean: Vec<f64>,
    deviation: Vec<f64>,
    /// `[width + 1, classes]`, the intercepts last.
    weights: Vec<f64>,
    iterations: usize,
}

impl LogisticRegression {
    /// Fits weights w and intercepts by L-BFGS (Liu and Nocedal, 1989) in f64: the least `Σ cross-entropy + |w|² / (2
    /// strength)` over features with mean 0 and variance 1, as scikit-learn's `LogisticRegression(C=strength)` after a
    /// `StandardScaler`. The result does not depend on the number of threads.
    ///
    /// # Errors
    /// [`Error::Setting`] for a strength that is not positive.
    pub fn fit(samples: &Samples<'_>, strength: f64) -> Result<Self> {
        if !(strength > 0.0 && strength.is_finite()) {
            let found = strength.to_string();
            return Err(Error::Setting { what: "strength of the regression", found, expected: "a positive number" });
        }
        let (mean, deviation) = samples.moments();
        let mut fitted = LogisticRegression {
            classes: samples.classes,
            weights: vec![0.0; (samples.width + 1) * samples.classes],
            mean,
            deviation,
            iterations: 0,
        };
        let decay = 1.0 / (strength * samples.len() as f64);
        let start = fitted.weights.clone();
        let (weights, iterations) =
            lbfgs::minimize(start, MAX_ITERATIONS, TOLERANCE, |weights| fitted.objective(samples, weights, decay));
        fitted.weights = weights;
        fitted.iterations = iterations;
        Ok(fitted)
    }

    /// Iterations of the solver.
    pub fn iterations(&self) -> usize {
        self.iterations
    }

    /// The share of the samples whose class has the largest score; of equal scores the lower class counts. Samples of
    /// more features than the regression was fitted to count by the first ones, samples of fewer by those that they
    /// have.
    pub fn accuracy(&self, samples: &Samples<'_>) -> f64 {
        let correct: usize = samples
            .chunks()
            .map(|(features, labels)| {
                let mut scores = vec![0f64; self.classes];
                let rows = features.chunks_exact(samples.width).zip(labels);
                rows.filter(|(sample, label)| {
                    self.scores(sample, &self.weights, &mut scores);
                    let best = scores.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
                    best.is_some_and(|(class, _)| class == **label as usize)
                })
                .count()
            })
            .sum();
        correct as f64 / samples.len() as f64
    }

    /// The standardized value of a feature.
    fn standardized(&self, feature: usize, value: f32) -> f64 {
        (f64::from(value) - self.mean[feature]) / self.deviation[feature]
    }

    fn scores(&self, sample: &[f32], weights: &[f64], scores: &mut [f64]) {
        let (weights, intercepts) = weights.split_at(self.mean.len() * self.classes);
        scores.copy_from_slice(intercepts);
        for (feature, (value, weights)) in sample.iter().zip(weights.chunks_exact(self.classes)).enumerate() {
            let value = self.standardized(feature, *value);
            scores.iter_mut().zip(weights).for_each(|(score, weight)| *score += value * weight);
        }
    }

    /// The mean cross-entropy with half the decay times |w|², and the derivatives.
    fn objective(&self, samples: &Samples<'_>, weights: &[f64], decay: f64) -> (f64, Vec<f64>) {
        let parts: Vec<(f64, Vec<f64>)> =
            samples.chunks().map(|(features, labels)| self.part(features, labels, weights)).collect();
        let count = samples.len() as f64;
        let mut loss = 0.0;
        let mut gradient = vec![0f64; weights.len()];
        for (part, derivatives) in parts {
            loss += part / count;
            gradient.iter_mut().zip(derivatives).for_each(|(sum, part)| *sum += part / count);
        }
        // Intercepts do not decay.
        for (gradient, weight) in gradient.iter_mut().zip(weights).take(self.mean.len() * self.classes) {
            loss += 0.5 * decay * weight * weight;
            *gradient += decay * weight;
        }
        (loss, gradient)
    }

    /// The sum of the cross-entropies of some samples, and its derivatives.
    fn part(&self, features: &[f32], labels: &[u32], weights: &[f64]) -> (f64, Vec<f64>) {
        let width = self.mean.len();
        let (mut loss, mut gradient, mut scores) = (0.0, vec![0f64; weights.len()], vec![0f64; self.classes]);
        for (sample, &label) in features.chunks_exact(width).zip(labels) {
            self.scores(sample, weights, &mut scores);
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let own = scores[label as usize];
            scores.iter_mut().for_each(|score| *score = (*score - most).exp());
            let sum: f64 = scores.iter().sum();
            loss += sum.ln() + most - own;
            scores.iter_mut().for_each(|score| *score /= sum);
            scores[label as usize] -= 1.0;
            for (feature, (value, gradient)) in sample.iter().zip(gradient.chunks_exact_mut(self.classes)).enumerate() {
                let value = self.standardized(feature, *value);
                gradient.iter_mut().zip(&scores).for_each(|(sum, score)| *sum += value * score);
            }
            gradient[width * self.classes..].iter_mut().zip(&scores).for_each(|(sum, score)| *sum += score);
        }
        (loss, gradient)
    }
}

#[cfg(test)]
mod tests;
