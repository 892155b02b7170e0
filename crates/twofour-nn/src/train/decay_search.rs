//! The strength of the decay of pruned weights, from flip rates (FST, Hu et al., ICML 2024).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{ConfigOf, SparseBegin, SparsityPlan, Trainer, TrainingData, TrainingSettings};
use crate::{Result, engine::Engine};

/// Trial runs that compare strengths of the decay of pruned weights, λ.
///
/// Each trial is the beginning of the run itself: the same initial weights, batches and learning rates. The rule's mask
/// is selected after every step of a trial, also where the run selects it rarely, and also in a dense trial, where
/// nothing computes with it. The ratio μ of a strength is the trial's flip rate over that of the dense trial, both over
/// the second half of the trials. FST's authors find strengths with μ from 0.60 to 0.95 to be good: pruned weights that
/// decay too little let masks change as if at random, and those that decay too much freeze the masks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecaySearch {
    /// The strengths.
    pub grid: Vec<f64>,
    /// Optimizer steps of a trial.
    pub steps: u64,
}

/// A trial and its flip rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DecayTrial {
    /// The strength; none in the dense trial.
    pub strength: Option<f64>,
    /// The mean share of mask elements that a step of the second half changes.
    pub flip_rate: f64,
}

/// A strength that was compared with the dense trial.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DecayCandidate {
    /// The strength.
    pub strength: f64,
    /// Its flip rate.
    pub flip_rate: f64,
    /// μ: its flip rate over the dense trial's; absent where the dense trial's masks did not change.
    pub ratio: Option<f64>,
}

/// What the trials found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecayChoice {
    /// The strength that the run takes.
    pub strength: f64,
    /// The ratio of that strength.
    pub ratio: Option<f64>,
    /// Whether the ratio is in [`DecaySearch::RATIOS`]. If no strength has such a ratio, the nearest one is taken.
    pub is_feasible: bool,
    /// The flip rate of the dense trial.
    pub dense_flip_rate: f64,
    /// All strengths, in the order of the grid.
    pub candidates: Vec<DecayCandidate>,
    /// Optimizer steps of a trial.
    pub steps: u64,
}

impl DecaySearch {
    /// The ratios of good strengths.
    pub const RATIOS: [f64; 2] = [0.60, 0.95];

    /// The strengths where a recipe names none: the published ones are from 1e-6 to 2e-3.
    pub const GRID: [f64; 8] = [1e-6, 6e-6, 2e-5, 6e-5, 2e-4, 6e-4, 2e-3, 6e-3];

    /// The trials, in order: the dense one first.
    pub fn trials(&self) -> impl Iterator<Item = Option<f64>> {
        std::iter::once(None).chain(self.grid.iter().copied().map(Some))
    }

    /// Runs a trial: of the plan with this strength, or of a dense model whose masks are observed. Returns the engine
    /// too.
    ///
    /// # Errors
    /// Those of [`Trainer::new`] and [`Trainer::step`].
    pub fn run<E: Engine, D: TrainingData>(
        &self,
        engine: E,
        (model, training): (&ConfigOf<D, E>, &TrainingSettings),
        plan: &SparsityPlan,
        data: &Arc<D>,
        strength: Option<f64>,
    ) -> Result<(E, DecayTrial)> {
        let plan = self.plan(plan, strength);
        let mut trainer = Trainer::new(engine, model.clone(), training, plan, data.clone())?;
        let begin = self.steps / 2;
        let mut rates = vec![];
        for step in 0..self.steps {
            let report = trainer.step()?;
            rates.extend(report.observed_flip_rate.filter(|_| step >= begin));
        }
        let flip_rate = rates.iter().sum::<f64>() / rates.len().max(1) as f64;
        Ok((trainer.into_engine(), DecayTrial { strength, flip_rate }))
    }

    /// The plan of a trial.
    fn plan(&self, plan: &SparsityPlan, strength: Option<f64>) -> SparsityPlan {
        let mut trial = SparsityPlan { observes: true, ..plan.clone() };
        // Layers that no rule of the plan masks are observed by nothing.
        let decaying = trial.overrides.iter_mut().filter(|part| part.method.can_observe());
        decaying.for_each(|part| part.observes = true);
        match strength {
            Some(strength) => {
                trial.set_decay(strength);
                // Masks have an effect from the first step on, wherever the run has its dense part.
                (trial.begin, trial.end, trial.two_of_four_from) = (SparseBegin::Step(0), None, None);
            }
            None => trial.make_dense(),
        }
        trial
    }

    /// The strength by the trials' flip rates: of the feasible ones that whose ratio is nearest to the middle of
    /// [`DecaySearch::RATIOS`], and otherwise the one nearest to them; the smaller of two that are equally near. None
    /// where the dense trial or every other one is missing.
    pub fn choose(&self, trials: &[DecayTrial]) -> Option<DecayChoice> {
        let of = |strength: Option<f64>| trials.iter().find(|trial| trial.strength == strength);
        let dense = of(None)?.flip_rate;
        let candidate = |strength: &f64| {
            let flip_rate = of(Some(*strength))?.flip_rate;
            let ratio = Some(flip_rate / dense).filter(|ratio| ratio.is_finite());
            Some(DecayCandidate { strength: *strength, flip_rate, ratio })
        };
        let candidates: Vec<DecayCandidate> = self.grid.iter().filter_map(candidate).collect();
        let [low, high] = Self::RATIOS;
        let distance = |candidate: &DecayCandidate| {
            let ratio = candidate.ratio.unwrap_or(f64::INFINITY);
            let outside = (low - ratio).max(ratio - high).max(0.0);
            [outside, (ratio - (low + high) / 2.0).abs(), candidate.strength]
        };
        let less = |a: &&DecayCandidate, b: &&DecayCandidate| {
            let pairs = distance(a).into_iter().zip(distance(b));
            pairs.map(|(a, b)| a.total_cmp(&b)).find(|order| order.is_ne()).unwrap_or(std::cmp::Ordering::Equal)
        };
        let best = *candidates.iter().min_by(less)?;
        let is_feasible = best.ratio.is_some_and(|ratio| (low..=high).contains(&ratio));
        Some(DecayChoice {
            strength: best.strength,
            ratio: best.ratio,
            is_feasible,
            dense_flip_rate: dense,
            candidates,
            steps: self.steps,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(dense: f64, rates: &[f64]) -> Option<DecayChoice> {
        let search = DecaySearch { grid: (0..rates.len()).map(|i| 10f64.powi(i as i32 - 6)).collect(), steps: 10 };
        let trial = |(strength, flip_rate)| DecayTrial { strength, flip_rate };
        let rates = std::iter::once(dense).chain(rates.iter().copied());
        search.choose(&search.trials().zip(rates).map(trial).collect::<Vec<_>>())
    }

    #[test]
    fn the_feasible_strength_nearest_to_the_middle_is_chosen() {
        let choice = choose(0.02, &[0.03, 0.0188, 0.016, 0.0122, 0.001]).unwrap();
        assert!(choice.is_feasible && choice.strength == 1e-4 && (choice.ratio.unwrap() - 0.8).abs() < 1e-12);
        assert_eq!(choice.candidates.len(), 5);
        // The bounds are feasible, and nothing outside of them is taken while something is inside.
        let choice = choose(1.0, &[0.59, 0.95, 2.0]).unwrap();
        assert!(choice.is_feasible && choice.strength == 1e-5);
    }

    #[test]
    fn without_a_feasible_strength_the_nearest_is_taken_and_said() {
        let choice = choose(1.0, &[1.4, 1.05, 0.2]).unwrap();
        assert!(!choice.is_feasible && choice.strength == 1e-5);
        let choice = choose(0.0, &[0.0, 0.1]).unwrap();
        assert!(!choice.is_feasible && choice.ratio.is_none() && choice.strength == 1e-6);
        assert!(choose(1.0, &[]).is_none());
        let search = DecaySearch { grid: vec![1.0], steps: 1 };
        assert!(search.choose(&[DecayTrial { strength: Some(1.0), flip_rate: 0.1 }]).is_none());
    }
}
