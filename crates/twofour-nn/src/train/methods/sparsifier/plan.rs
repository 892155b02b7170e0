//! What a sparsifier does with the layers of a part of the plan.

use std::fmt;

use serde::{Deserialize, Serialize};
use twofour::{select::Sparsity, sparsify::Schedule};

use super::{
    super::step_of, LevelSchedule, LevelScheduleKind, PatternText, SparsifierCriterion, SparsifierKind, SparsifierRule,
    SparsifierSettings,
};
use crate::{Error, Result};

/// Levels that a plan lists; the others are left out.
const LISTED: u64 = 10;

/// What a sparsifier does with the layers of a part of the [`SparsityPlan`](crate::train::SparsityPlan).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SparsifierPlan {
    /// The rule of masks.
    pub rule: SparsifierRule,
    /// What the rule compares.
    #[serde(default)]
    pub criterion: SparsifierCriterion,
    /// The level that the schedule goes to, from 0 to 1; what it means is the rule's affair.
    pub level: f64,
    /// The levels before.
    pub schedule: LevelSchedule,
    /// Whether pruned weights become zero in the master weight and stay so. Otherwise masks are chosen from the dense
    /// master weight, whose pruned elements can regrow.
    pub in_place: bool,
}

impl SparsifierPlan {
    /// 2:4 by magnitude from the start, with regrowth.
    pub const TWO_OF_FOUR: Self = SparsifierPlan {
        rule: SparsifierRule::TWO_OF_FOUR,
        criterion: SparsifierCriterion::Magnitude,
        level: 1.0,
        schedule: LevelSchedule::Constant,
        in_place: false,
    };

    /// The level in a step, counted from 0.
    pub fn level_at(&self, step: u64) -> f64 {
        self.schedule.level(self.level, step)
    }

    /// Checks rule, level and schedule.
    ///
    /// # Errors
    /// Numbers out of range.
    pub fn check(&self) -> Result<()> {
        self.rule.check()?;
        let fault = |what, found: String, expected| Err(Error::Setting { what, found, expected });
        let is_share = |level: f64| (0.0..=1.0).contains(&level);
        if !is_share(self.level) {
            return fault("the level of a sparsifier", self.level.to_string(), "a share from 0 to 1");
        }
        if let SparsifierRule::Pattern(PatternText(pattern @ Sparsity::Vectors { .. })) = self.rule
            && !matches!(self.schedule, LevelSchedule::Constant | LevelSchedule::OneShot { .. })
        {
            let expected = "constant or one-shot: V:N:M has no lower level";
            return fault("the schedule of a sparsifier", format!("levels of {pattern}"), expected);
        }
        match &self.schedule {
            LevelSchedule::Cubic { start_level, .. } if !(0.0..=self.level).contains(start_level) => {
                let found = start_level.to_string();
                fault("the level at the start of a cubic schedule", found, "from 0 to the level that it goes to")
            }
            LevelSchedule::Cubic { steps: 0, .. } => fault("steps of a cubic schedule", "0".to_owned(), "at least 1"),
            LevelSchedule::Steps { at, factors } => {
                if at.is_empty() || at.len() != factors.len() || !at.is_sorted_by(|a, b| a < b) {
                    let found = format!("{at:?} for {factors:?}");
                    return fault("the steps of a schedule", found, "ascending, and as many as factors");
                }
                match factors.iter().find(|factor| !is_share(**factor)) {
                    Some(factor) => fault("a factor of a schedule", factor.to_string(), "a share from 0 to 1"),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Steps at which masks are chosen, with their levels: every one at which the level jumps, and some of those in
    /// between. Masks are also chosen every `mask_every` steps from `begin` to before `end`; 0 is never.
    pub fn levels(&self, [begin, end]: [u64; 2], mask_every: u64) -> Vec<(u64, f64)> {
        let mut at = vec![begin];
        match &self.schedule {
            LevelSchedule::Constant => {}
            LevelSchedule::OneShot { step } => at.push(*step),
            LevelSchedule::Iterative { start, every, rounds } => {
                at.extend((0..*rounds).map(|round| start.saturating_add(round.saturating_mul(*every))));
            }
            LevelSchedule::Cubic { start, steps, .. } => {
                let every = mask_every.max(1);
                let parts = (1..LISTED).map(|part| (u128::from(*steps) * u128::from(part) / u128::from(LISTED)) as u64);
                at.extend(parts.map(|passed| start.saturating_add(passed).div_ceil(every).saturating_mul(every)));
                at.push(start.saturating_add(*steps));
                at.retain(|step| *step <= start.saturating_add(*steps));
            }
            LevelSchedule::Steps { at: own, .. } => at.extend(own),
        }
        at.sort_unstable();
        at.dedup();
        let listed = at.into_iter().filter(|step| (begin..end).contains(step));
        listed.map(|step| (step, self.level_at(step))).collect()
    }
}

/// A setting that is missing.
fn missing(what: &'static str, expected: &'static str) -> Error {
    Error::Setting { what, found: "nothing".to_owned(), expected }
}

impl SparsifierPlan {
    /// The step from which layers are masked where a recipe says nothing else: 0, half of the run with the schedule
    /// `one-shot`, a tenth with `iterative` and `cubic`, and the first of `at` with `steps`. Gradients come with the
    /// first step, so that it is not before step 1 with the criterion `saliency`.
    pub(super) fn default_begin(settings: &SparsifierSettings, steps: u64) -> u64 {
        let least = u64::from(settings.criterion.is_some_and(SparsifierCriterion::reads_gradient));
        match settings.schedule.unwrap_or_default() {
            LevelScheduleKind::Constant => least,
            LevelScheduleKind::OneShot => least.max(steps / 2),
            LevelScheduleKind::Iterative | LevelScheduleKind::Cubic => least.max(steps / 10),
            LevelScheduleKind::Steps => {
                settings.at.as_ref().and_then(|at| at.first()).map_or(0, |share| step_of(*share, steps))
            }
        }
    }

    /// Steps between two choices of the mask where a recipe says nothing else; 0 where only jumps of the level choose
    /// it.
    pub(super) fn default_mask_every(settings: &SparsifierSettings, steps: u64) -> u64 {
        match (settings.kind, settings.schedule.unwrap_or_default()) {
            (Some(SparsifierKind::NearlyDiagonal), _) => 0,
            (_, LevelScheduleKind::Constant | LevelScheduleKind::Cubic) => (steps / 100).max(1),
            _ => 0,
        }
    }

    /// The step at which the schedules `cubic` and `iterative` reach their level.
    pub(super) fn until(settings: &SparsifierSettings, steps: u64) -> u64 {
        step_of(settings.until.unwrap_or(SparsifierSettings::UNTIL), steps)
    }

    /// The plan of a recipe's settings for layers that are masked from step `begin` of a run of `steps` on.
    ///
    /// # Errors
    /// No kind, numbers out of range, and settings that exclude each other.
    pub fn new(settings: &SparsifierSettings, begin: u64, steps: u64) -> Result<Self> {
        let block = settings.block.unwrap_or([1, 4]);
        let kind = settings.kind.ok_or_else(|| missing("sparsity.sparsifier.kind", "one of the rules of masks"))?;
        let rule = match kind {
            SparsifierKind::TwoOfFour => SparsifierRule::TWO_OF_FOUR,
            SparsifierKind::WeightNorm => {
                let zeros = settings.zeros_per_block.unwrap_or(block[0].saturating_mul(block[1]));
                SparsifierRule::WeightNorm { block, zeros, norm: settings.norm.unwrap_or_default() }
            }
            SparsifierKind::Unstructured => SparsifierRule::Unstructured,
            SparsifierKind::Pattern => {
                let pattern = settings.pattern.ok_or_else(|| missing("sparsity.sparsifier.pattern", "a pattern"));
                SparsifierRule::Pattern(pattern?)
            }
            SparsifierKind::NearlyDiagonal => {
                let expected = "a number of diagonals";
                let nearliness = settings.nearliness.ok_or_else(|| missing("sparsity.sparsifier.nearliness", expected));
                SparsifierRule::NearlyDiagonal { nearliness: nearliness? }
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
        let level = settings.target();
        let (criterion, in_place) = (settings.criterion.unwrap_or_default(), settings.in_place.unwrap_or(false));
        let plan = SparsifierPlan { rule, criterion, level, schedule, in_place };
        plan.check()?;
        Ok(plan)
    }
}

/// What it prunes, in words.
impl fmt::Display for SparsifierPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.rule, self.criterion.what())
    }
}
