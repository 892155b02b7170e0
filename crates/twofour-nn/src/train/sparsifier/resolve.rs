//! From a recipe's settings to the plan of a sparsifier.

use super::{LevelSchedule, SparsifierPlan, SparsifierRule};
use crate::{
    Error, Result,
    recipe::{LevelScheduleKind, SparsifierCriterion, SparsifierKind, SparsifierSettings},
};

/// A share of all steps, as a step.
fn step_of(share: f64, steps: u64) -> u64 {
    (share * steps as f64).round() as u64
}

/// A setting that is missing.
fn missing(what: &'static str, expected: &'static str) -> Error {
    Error::Setting { what, found: "nothing".to_owned(), expected }
}

impl SparsifierPlan {
    /// The step from which layers are masked where a recipe says nothing else: 0, half of the run with the schedule `one-shot`, a tenth with `iterative` and `cubic`,
    /// and the first of `at` with `steps`. Gradients come with the first step, so that it is not before step 1 with the criterion `saliency`.
    pub(crate) fn default_begin(settings: &SparsifierSettings, steps: u64) -> u64 {
        let least = u64::from(settings.criterion == Some(SparsifierCriterion::Saliency));
        match settings.schedule.unwrap_or_default() {
            LevelScheduleKind::Constant => least,
            LevelScheduleKind::OneShot => least.max(steps / 2),
            LevelScheduleKind::Iterative | LevelScheduleKind::Cubic => least.max(steps / 10),
            LevelScheduleKind::Steps => {
                settings.at.as_ref().and_then(|at| at.first()).map_or(0, |share| step_of(*share, steps))
            }
        }
    }

    /// Steps between two choices of the mask where a recipe says nothing else; 0 where only jumps of the level choose it.
    pub(crate) fn default_mask_every(settings: &SparsifierSettings, steps: u64) -> u64 {
        match (settings.kind, settings.schedule.unwrap_or_default()) {
            (Some(SparsifierKind::NearlyDiagonal), _) => 0,
            (_, LevelScheduleKind::Constant | LevelScheduleKind::Cubic) => (steps / 100).max(1),
            _ => 0,
        }
    }

    /// The step at which the schedules `cubic` and `iterative` reach their level.
    pub(crate) fn until(settings: &SparsifierSettings, steps: u64) -> u64 {
        step_of(settings.until.unwrap_or(SparsifierSettings::UNTIL), steps)
    }

    /// The plan of a recipe's settings for layers that are masked from step `begin` of a run of `steps` on.
    ///
    /// # Errors
    /// No kind, numbers out of range, and settings that exclude each other.
    pub fn new(settings: &SparsifierSettings, begin: u64, steps: u64) -> Result<Self> {
        let block = settings.block.unwrap_or([1, 4]);
        let kind = settings.kind.ok_or_else(|| missing("sparsity.sparsifier.kind", "one of the rules of masks"))?;
        let (rule, level) = match kind {
            SparsifierKind::TwoOfFour => (SparsifierRule::TWO_OF_FOUR, 1.0),
            SparsifierKind::WeightNorm => {
                let zeros = settings.zeros_per_block.unwrap_or(block[0].saturating_mul(block[1]));
                (SparsifierRule::WeightNorm { block, zeros, norm: settings.norm.unwrap_or_default() }, 0.5)
            }
            SparsifierKind::Unstructured => (SparsifierRule::Unstructured, 0.5),
            SparsifierKind::NearlyDiagonal => {
                let expected = "a number of diagonals";
                let nearliness = settings.nearliness.ok_or_else(|| missing("sparsity.sparsifier.nearliness", expected));
                (SparsifierRule::NearlyDiagonal { nearliness: nearliness? }, 1.0)
            }
        };
        let until = Self::until(settings, steps);
        let schedule = match settings.schedule.unwrap_or_default() {
            LevelScheduleKind::Constant => LevelSchedule::Constant,
            LevelScheduleKind::OneShot => LevelSchedule::OneShot { step: begin },
            LevelScheduleKind::Iterative => {
                let rounds = settings.rounds.unwrap_or(SparsifierSettings::ROUNDS);
                let every = until.saturating_sub(begin).checked_div(rounds.saturating_sub(1)).unwrap_or(1).max(1);
                LevelSchedule::Iterative { start: begin, every, rounds }
            }
            LevelScheduleKind::Cubic => {
                let start_level = settings.start_level.unwrap_or(0.0);
                LevelSchedule::Cubic { start_level, start: begin, steps: until.saturating_sub(begin) }
            }
            LevelScheduleKind::Steps => {
                let shares = settings.at.as_deref().unwrap_or_default();
                let factors = settings.factors.clone().unwrap_or_default();
                LevelSchedule::Steps { at: shares.iter().map(|share| step_of(*share, steps)).collect(), factors }
            }
        };
        let level = settings.level.unwrap_or(level);
        let (criterion, in_place) = (settings.criterion.unwrap_or_default(), settings.in_place.unwrap_or(false));
        let plan = SparsifierPlan { rule, criterion, level, schedule, in_place };
        plan.check()?;
        Ok(plan)
    }
}
