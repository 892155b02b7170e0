//! The terms that ALiBi adds to scores of attention.

use half::bf16;

use crate::model::config::{Alibi, Positions, TransformerConfig};

/// The slopes of a model's heads.
#[derive(Debug)]
pub(crate) struct Slopes {
    slopes: Vec<f32>,
    /// The factor of the terms, where slopes, positions and products are rounded to bf16.
    rounded: Option<f32>,
}

impl Slopes {
    /// The slopes of a model; none for a model without ALiBi.
    pub(crate) fn of(config: &TransformerConfig) -> Option<Self> {
        let Positions::Alibi(alibi) = config.positions else { return None };
        let slopes = Alibi::slopes(config.attention.heads);
        Some(Slopes { slopes, rounded: alibi.rounded.then(|| config.score_scale()) })
    }

    /// Adds the terms to the scores of a head's query at a position for the keys from `first` on.
    pub(super) fn add(&self, (head, position): (usize, usize), first: usize, scores: &mut [f32]) {
        let Some(&slope) = self.slopes.get(head) else { return };
        match self.rounded {
            None => {
                let begin = first as f32 - position as f32;
                scores.iter_mut().enumerate().for_each(|(key, score)| *score += slope * (begin + key as f32));
            }
            Some(scale) => {
                let round = |value: f32| bf16::from_f32(value).to_f32();
                let term = |key: usize| round(round(slope) * round((first + key) as f32));
                scores.iter_mut().enumerate().for_each(|(key, score)| *score += scale * term(key));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_lower_scores_and_falcon_rounds_positions() {
        let plain = Slopes { slopes: vec![0.5, 0.25], rounded: None };
        let mut scores = [1.0; 3];
        plain.add((1, 6), 4, &mut scores);
        assert_eq!(scores, [0.5, 0.75, 1.0]);
        let falcon = Slopes { slopes: vec![0.7], rounded: Some(2.0) };
        let mut scores = [0.0; 2];
        // By torch 2.15: `torch.tensor(0.7).bfloat16() * torch.tensor([257, 259])` is [179, 182] in bfloat16.
        falcon.add((0, 300), 257, &mut scores[..1]);
        falcon.add((0, 300), 259, &mut scores[1..]);
        assert_eq!(scores, [2.0 * 179.0, 2.0 * 182.0]);
    }
}
