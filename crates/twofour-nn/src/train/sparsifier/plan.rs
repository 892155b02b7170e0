//! What a sparsifier does with the layers of a part of the plan.

use std::fmt;

use serde::{Deserialize, Serialize};
use twofour::sparsify::Schedule;

use super::{LevelSchedule, SparsifierRule};
use crate::{Error, Result, recipe::SparsifierCriterion};

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
    /// Whether pruned weights become zero in the master weight and stay so. Otherwise masks are chosen from the dense master weight, whose pruned elements can regrow.
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

    /// Steps at which masks are chosen, with their levels: every one at which the level jumps, and some of those in between. Masks are also chosen every `mask_every`
    /// steps from `begin` to before `end`; 0 is never.
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

/// What it prunes, in words.
impl fmt::Display for SparsifierPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.criterion {
            SparsifierCriterion::Magnitude => self.rule.fmt(f),
            SparsifierCriterion::Saliency => write!(f, "{}, of weights times gradients", self.rule),
        }
    }
}
