//! The levels of a sparsifier over the steps of a run.

use serde::{Deserialize, Serialize};
use twofour::sparsify::{
    ConstantSchedule, CubicSchedule, IterativeSchedule, LambdaSchedule, OneShotSchedule, Schedule,
};

/// How a level goes to its target over the optimizer steps of a run, counted from 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LevelSchedule {
    /// The target from the start: [`ConstantSchedule`].
    Constant,
    /// 0 before a step, the target from then on, under one mask: [`OneShotSchedule`].
    OneShot {
        /// The step from which the level is the target.
        step: u64,
    },
    /// Equal rises, each of which chooses the mask: [`IterativeSchedule`].
    Iterative {
        /// The step of the first rise.
        start: u64,
        /// Steps from one rise to the next.
        every: u64,
        /// Rises up to the target.
        rounds: u64,
    },
    /// Fast at first, slower towards the target: [`CubicSchedule`].
    Cubic {
        /// The level at the start.
        start_level: f64,
        /// The step of the start.
        start: u64,
        /// Steps from the start to the target.
        steps: u64,
    },
    /// Shares of the target, each from a step on, where the mask is chosen: a [`LambdaSchedule`] of a function with
    /// steps.
    Steps {
        /// The steps, ascending.
        at: Vec<u64>,
        /// The shares.
        factors: Vec<f64>,
    },
}

impl LevelSchedule {
    /// Whether the mask is chosen at a step because of the level, however rarely it is otherwise.
    pub fn chooses_at(&self, step: u64) -> bool {
        match self {
            LevelSchedule::Constant => false,
            LevelSchedule::OneShot { step: own } => step == *own,
            LevelSchedule::Iterative { start, every, rounds } => {
                let every = (*every).max(1);
                let passed = step.checked_sub(*start);
                passed.is_some_and(|passed| passed.is_multiple_of(every) && passed / every < (*rounds).max(1))
            }
            LevelSchedule::Cubic { start, steps, .. } => step == start.saturating_add(*steps),
            LevelSchedule::Steps { at, .. } => at.contains(&step),
        }
    }

    /// The share of the target in a step.
    fn factor(at: &[u64], factors: &[f64], step: u64) -> f64 {
        at.iter().zip(factors).take_while(|(at, _)| **at <= step).last().map_or(0.0, |(_, factor)| *factor)
    }
}

impl Schedule for LevelSchedule {
    fn level(&self, base: f64, step: u64) -> f64 {
        match self {
            LevelSchedule::Constant => ConstantSchedule.level(base, step),
            LevelSchedule::OneShot { step: epoch } => OneShotSchedule { epoch: *epoch }.level(base, step),
            LevelSchedule::Iterative { start, every, rounds } => {
                IterativeSchedule { start: *start, every: *every, times: *rounds }.level(base, step)
            }
            LevelSchedule::Cubic { start_level, start, steps } => {
                let (every, times) = (1, *steps);
                let cubic = CubicSchedule { start_level: *start_level, start: *start, every, times, zero_before: true };
                cubic.level(base, step)
            }
            LevelSchedule::Steps { at, factors } => {
                LambdaSchedule(|step| Self::factor(at, factors, step)).level(base, step)
            }
        }
    }
}
