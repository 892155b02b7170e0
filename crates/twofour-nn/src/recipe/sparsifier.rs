//! The sparsifier of a recipe: masks of any pattern, and how their level rises.

use serde::{Deserialize, Serialize};

use super::reader::Named;
use crate::train::BlockNorm;

/// The rule of a sparsifier's masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SparsifierKind {
    /// Two zeros in the share `level` of the groups of four in a row, by magnitude.
    #[serde(rename = "2:4")]
    TwoOfFour,
    /// Of the share `level` of blocks with the lowest norms, the lowest elements: torch's `WeightNormSparsifier`.
    WeightNorm,
    /// The share `level` of the whole weight with the lowest magnitudes.
    Unstructured,
    /// All but a band around the diagonal: torch's `NearlyDiagonalSparsifier`.
    NearlyDiagonal,
}

impl Named for SparsifierKind {
    const ALL: &'static [(&'static str, Self)] = &[
        ("2:4", SparsifierKind::TwoOfFour),
        ("weight-norm", SparsifierKind::WeightNorm),
        ("unstructured", SparsifierKind::Unstructured),
        ("nearly-diagonal", SparsifierKind::NearlyDiagonal),
    ];
}

/// What is compared where a sparsifier chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SparsifierCriterion {
    /// The weight.
    #[default]
    Magnitude,
    /// The weight times its gradient in the step before ([`Saliency`](twofour::criterion::Saliency)).
    Saliency,
}

impl Named for SparsifierCriterion {
    const ALL: &'static [(&'static str, Self)] =
        &[("magnitude", SparsifierCriterion::Magnitude), ("saliency", SparsifierCriterion::Saliency)];
}

impl Named for BlockNorm {
    const ALL: &'static [(&'static str, Self)] = &[("l1", BlockNorm::L1), ("l2", BlockNorm::L2)];
}

/// How the level goes to its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LevelScheduleKind {
    /// The target from the beginning.
    #[default]
    Constant,
    /// The target from the beginning, under the mask that is chosen then.
    OneShot,
    /// Equal rises, each with a new mask.
    Iterative,
    /// Fast at first, slower towards the target (Zhu and Gupta, 2017): torch's `CubicSL`.
    Cubic,
    /// Given shares of the target from given steps on: a function of the step times the target, as torch's `LambdaSL`.
    Steps,
}

impl Named for LevelScheduleKind {
    const ALL: &'static [(&'static str, Self)] = &[
        ("constant", LevelScheduleKind::Constant),
        ("one-shot", LevelScheduleKind::OneShot),
        ("iterative", LevelScheduleKind::Iterative),
        ("cubic", LevelScheduleKind::Cubic),
        ("steps", LevelScheduleKind::Steps),
    ];
}

/// The section `[sparsity.sparsifier]`, or `[sparsity.override.sparsifier]`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SparsifierSettings {
    /// The rule; required.
    pub kind: Option<SparsifierKind>,
    /// What is compared; magnitudes if absent.
    pub criterion: Option<SparsifierCriterion>,
    /// The target of the level, from 0 to 1: of blocks, or of elements with `unstructured`. 1 with `2:4`, else 0.5.
    pub level: Option<f64>,
    /// Rows and columns of a block of `weight-norm`; 1 and 4 if absent.
    pub block: Option<[usize; 2]>,
    /// Pruned elements of a chosen block of `weight-norm`; all if absent.
    pub zeros_per_block: Option<usize>,
    /// The norm of `weight-norm`; the square if absent.
    pub norm: Option<BlockNorm>,
    /// Diagonals of the band of `nearly-diagonal`; an odd number, required.
    pub nearliness: Option<u32>,
    /// How the level goes to its target.
    pub schedule: Option<LevelScheduleKind>,
    /// The level where `cubic` begins; 0 if absent.
    pub start_level: Option<f64>,
    /// The share of all steps at which `cubic` and `iterative` reach the target; [`SparsifierSettings::UNTIL`] if absent.
    pub until: Option<f64>,
    /// Rises of `iterative`; [`SparsifierSettings::ROUNDS`] if absent.
    pub rounds: Option<u64>,
    /// Shares of all steps from which the `factors` of `steps` hold; required.
    pub at: Option<Vec<f64>>,
    /// Shares of the target with `steps`; required.
    pub factors: Option<Vec<f64>>,
    /// Whether pruned weights become zero in the master weight, for good.
    pub in_place: Option<bool>,
}

impl SparsifierSettings {
    /// The share of all steps at which `cubic` and `iterative` reach the target where a recipe says nothing.
    pub const UNTIL: f64 = 0.75;

    /// Rises of `iterative` where a recipe says nothing.
    pub const ROUNDS: u64 = 4;

    /// Whether these settings are of another kind or schedule than the section's, so that times of the section do not hold for them.
    pub(super) fn has_other_times(&self, section: &SparsifierSettings) -> bool {
        let other_kind = self.kind.is_some_and(|kind| Some(kind) != section.kind);
        other_kind || self.schedule.is_some_and(|schedule| schedule != section.schedule.unwrap_or_default())
    }

    /// These settings over those of the section. With another kind, what describes the section's rule does not hold; with another schedule, what describes that.
    #[must_use]
    pub fn over(&self, section: &SparsifierSettings) -> SparsifierSettings {
        let mut base = section.clone();
        if self.kind.is_some_and(|kind| Some(kind) != base.kind) {
            (base.level, base.block, base.zeros_per_block) = (None, None, None);
            (base.norm, base.nearliness, base.criterion) = (None, None, None);
        }
        if self.schedule.is_some_and(|schedule| schedule != base.schedule.unwrap_or_default()) {
            (base.start_level, base.until, base.rounds) = (None, None, None);
            (base.at, base.factors) = (None, None);
        }
        SparsifierSettings {
            kind: self.kind.or(base.kind),
            criterion: self.criterion.or(base.criterion),
            level: self.level.or(base.level),
            block: self.block.or(base.block),
            zeros_per_block: self.zeros_per_block.or(base.zeros_per_block),
            norm: self.norm.or(base.norm),
            nearliness: self.nearliness.or(base.nearliness),
            schedule: self.schedule.or(base.schedule),
            start_level: self.start_level.or(base.start_level),
            until: self.until.or(base.until),
            rounds: self.rounds.or(base.rounds),
            at: self.at.clone().or(base.at),
            factors: self.factors.clone().or(base.factors),
            in_place: self.in_place.or(base.in_place),
        }
    }
}
