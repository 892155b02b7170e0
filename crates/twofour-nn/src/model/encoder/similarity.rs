//! How near the sentence embeddings of two models are.

use serde::Serialize;

use crate::{Error, Result};

/// The embeddings of the same sentences by two encoders, compared.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Similarity {
    /// The mean of the cosines between both embeddings of a sentence.
    pub mean_cosine: f64,
    /// The lowest of them.
    pub lowest_cosine: f64,
    /// Spearman's correlation of the cosines of all pairs of sentences by one encoder with those by the other: whether
    /// both find the same sentences near. 1 where all are in the same order.
    pub rank_correlation: f64,
    /// Number of sentences.
    pub sentences: usize,
}

impl Similarity {
    /// Compares embeddings of unit length: `one[i]` and `other[i]` are those of the same sentence.
    ///
    /// # Errors
    /// Fewer than three sentences, or embeddings of other widths.
    pub fn between(one: &[Vec<f64>], other: &[Vec<f64>]) -> Result<Self> {
        let sentences = one.len();
        if sentences < 3 || other.len() != sentences {
            let found = format!("{sentences} and {}", other.len());
            return Err(Error::Setting { what: "sentences to compare", found, expected: "the same three or more" });
        }
        let width = one[0].len();
        if let Some(found) = one.iter().chain(other).map(Vec::len).find(|found| *found != width) {
            return Err(Error::length("an embedding", width, found));
        }
        let cosine = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let cosines: Vec<f64> = one.iter().zip(other).map(|(a, b)| cosine(a, b)).collect();
        let pairs = |all: &[Vec<f64>]| -> Vec<f64> {
            let of = |i: usize| (0..i).map(move |j| cosine(&all[i], &all[j]));
            (0..all.len()).flat_map(of).collect()
        };
        Ok(Similarity {
            mean_cosine: cosines.iter().sum::<f64>() / sentences as f64,
            lowest_cosine: cosines.iter().copied().fold(f64::INFINITY, f64::min),
            rank_correlation: correlation(&ranks(&pairs(one)), &ranks(&pairs(other))),
            sentences,
        })
    }
}

/// The rank of each value; equal ones share the mean of theirs.
fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    for group in order.chunk_by(|a, b| values[*a] == values[*b]) {
        let rank = first as f64 + (group.len() - 1) as f64 / 2.0;
        group.iter().for_each(|index| ranks[*index] = rank);
        first += group.len();
    }
    ranks
}

/// Pearson's correlation; 0 where one side is constant.
fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let (mean_a, mean_b) = (mean(a), mean(b));
    let sum = |f: &dyn Fn(f64, f64) -> f64| a.iter().zip(b).map(|(a, b)| f(a - mean_a, b - mean_b)).sum::<f64>();
    let scale = (sum(&|a, _| a * a) * sum(&|_, b| b * b)).sqrt();
    if scale == 0.0 { 0.0 } else { sum(&|a, b| a * b) / scale }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_their_correlation_are_those_of_spearman() {
        assert_eq!(ranks(&[3.0, 1.0, 2.0, 1.0]), [3.0, 0.5, 2.0, 0.5]);
        let of = |a: &[f64], b: &[f64]| correlation(&ranks(a), &ranks(b));
        assert!((of(&[1.0, 2.0, 3.0], &[10.0, 20.0, 900.0]) - 1.0).abs() < 1e-12);
        assert!((of(&[1.0, 2.0, 3.0], &[3.0, 2.0, 1.0]) + 1.0).abs() < 1e-12);
        // scipy.stats.spearmanr([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) = 0.8207826816681233
        assert!((of(&[1.0, 2.0, 3.0, 4.0, 5.0], &[5.0, 6.0, 7.0, 8.0, 7.0]) - 0.820_782_681_668_123_3).abs() < 1e-12);
    }

    #[test]
    fn embeddings_are_compared_with_themselves_turned_and_others() {
        let unit = |angle: f64| vec![angle.cos(), angle.sin()];
        let one: Vec<Vec<f64>> = [0.0, 0.3, 0.7, 2.0].map(unit).into();
        let same = Similarity::between(&one, &one).unwrap();
        assert!((same.mean_cosine - 1.0).abs() < 1e-12 && (same.rank_correlation - 1.0).abs() < 1e-12);
        // Turned as a whole, every pair keeps its cosine.
        let turned: Vec<Vec<f64>> = [0.5, 0.8, 1.2, 2.5].map(unit).into();
        let turned = Similarity::between(&one, &turned).unwrap();
        assert!((turned.mean_cosine - 0.5f64.cos()).abs() < 1e-12 && (turned.rank_correlation - 1.0).abs() < 1e-12);
        let other: Vec<Vec<f64>> = [0.0, 2.0, 0.1, 0.3].map(unit).into();
        assert!(Similarity::between(&one, &other).unwrap().rank_correlation < 0.5);
        assert!(Similarity::between(&one[..2], &one[..2]).is_err() && Similarity::between(&one, &one[..3]).is_err());
        assert!(Similarity::between(&one, &vec![vec![1.0]; 4]).is_err());
    }
}
