//! The sparsifier of a recipe: masks of any pattern, and how their level rises.

use serde::{Deserialize, Serialize};

use super::{BlockNorm, PatternText, SparsifierCriterion};
use crate::settings::{Mistakes, Named, SHARE, Section, settings};

/// The rule of a sparsifier's masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SparsifierKind {
    /// Two zeros in the share `level` of the groups of four in a row, by magnitude.
    #[serde(rename = "2:4")]
    TwoOfFour,
    /// The lowest elements of the share `level` of blocks with the lowest norms: torch's `WeightNormSparsifier`.
    WeightNorm,
    /// The share `level` of the whole weight with the lowest magnitudes.
    Unstructured,
    /// All but a band around the diagonal: torch's `NearlyDiagonalSparsifier`.
    NearlyDiagonal,
    /// What the key `pattern` says: any [`Sparsity`](twofour::select::Sparsity).
    Pattern,
}

impl Named for SparsifierKind {
    const ALL: &'static [(&'static str, Self)] = &[
        ("2:4", SparsifierKind::TwoOfFour),
        ("weight-norm", SparsifierKind::WeightNorm),
        ("unstructured", SparsifierKind::Unstructured),
        ("nearly-diagonal", SparsifierKind::NearlyDiagonal),
        ("pattern", SparsifierKind::Pattern),
    ];
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

/// What a pattern is.
const PATTERNS: &str = "a pattern, \"4:8\", \"64:2:8\", \"block:16x16@0.8\", \"rows@0.25\", \"columns@0.25\", \
                        \"unstructured@0.5\" or \"unstructured-rows@0.5\"";

/// The largest side of a block, and the most rises of a level.
const LARGEST_BLOCK: u64 = 1 << 20;
const MAX_ROUNDS: u64 = 1000;

/// Declares the settings of a sparsifier: of each its type and how it is read.
macro_rules! keys {
    ($( $(#[$meta:meta])* $key:ident: $type:ty = $read:expr; )*) => {
        settings! {
            /// The section `[sparsity.sparsifier]`, or `[sparsity.override.sparsifier]`.
            #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
            #[serde(deny_unknown_fields, default)]
            pub struct SparsifierSettings {
                $( $(#[$meta])* $key: Option<$type> = None, |s, key, m| {
                    let read: fn(&mut Section<'_>, &'static str, &mut Mistakes) -> Option<$type> = $read;
                    read(s, key, m).map(Some)
                }; )*
            }
        }

        impl SparsifierSettings {
            /// These settings, and for the rest those of `base`.
            fn or(&self, base: SparsifierSettings) -> Self {
                SparsifierSettings { $( $key: self.$key.clone().or(base.$key), )* }
            }
        }
    };
}

keys! {
    /// The rule; required.
    kind: SparsifierKind = |s, key, m| s.choice(key, m);
    /// What is compared; magnitudes if absent.
    criterion: SparsifierCriterion = |s, key, m| s.choice(key, m);
    /// The target of the level, from 0 to 1: of blocks, or of elements with `unstructured`. 1 with `2:4`, else 0.5;
    /// with `pattern` it is the share that stands there.
    level: f64 = |s, key, m| s.number(key, SHARE, m);
    /// The pattern of `pattern`, "block:16x16@0.8" for instance; required.
    pattern: PatternText = |s, key, m| s.parsed(key, PATTERNS, m).map(PatternText);
    /// Rows and columns of a block of `weight-norm`; 1 and 4 if absent.
    block: [usize; 2] = |s, key, m| {
        let sides = s.integers(key, (1, LARGEST_BLOCK), ("rows and columns", 2), m);
        let sides = sides.and_then(|sides| <[u64; 2]>::try_from(sides).ok());
        sides.map(|sides| sides.map(|side| side as usize))
    };
    /// Pruned elements of a chosen block of `weight-norm`; all if absent.
    zeros_per_block: usize = |s, key, m| s.integer(key, 0, LARGEST_BLOCK, m).map(|zeros| zeros as usize);
    /// The norm of `weight-norm`; the square if absent.
    norm: BlockNorm = |s, key, m| s.choice(key, m);
    /// Diagonals of the band of `nearly-diagonal`; an odd number, required.
    nearliness: u32 = |s, key, m| s.integer(key, 1, LARGEST_BLOCK, m).map(|diagonals| diagonals as u32);
    /// How the level goes to its target.
    schedule: LevelScheduleKind = |s, key, m| s.choice(key, m);
    /// The level where `cubic` begins; 0 if absent.
    start_level: f64 = |s, key, m| s.number(key, SHARE, m);
    /// The share of all steps at which `cubic` and `iterative` reach the target; [`SparsifierSettings::UNTIL`] if
    /// absent.
    until: f64 = |s, key, m| s.number(key, SHARE, m);
    /// Rises of `iterative`; [`SparsifierSettings::ROUNDS`] if absent.
    rounds: u64 = |s, key, m| s.integer(key, 1, MAX_ROUNDS, m);
    /// Shares of all steps from which the `factors` of `steps` hold; required.
    at: Vec<f64> = |s, key, m| s.numbers(key, SHARE, m);
    /// Shares of the target with `steps`; required.
    factors: Vec<f64> = |s, key, m| s.numbers(key, SHARE, m);
    /// Whether pruned weights become zero in the master weight, for good.
    in_place: bool = |s, key, m| s.boolean(key, m);
}

impl SparsifierSettings {
    /// The share of all steps at which `cubic` and `iterative` reach the target where a recipe says nothing.
    pub const UNTIL: f64 = 0.75;

    /// Rises of `iterative` where a recipe says nothing.
    pub const ROUNDS: u64 = 4;

    /// The level that the schedule goes to.
    pub(super) fn target(&self) -> f64 {
        let own = match (self.kind, self.pattern) {
            (Some(SparsifierKind::TwoOfFour | SparsifierKind::NearlyDiagonal), _) => 1.0,
            (Some(SparsifierKind::Pattern), Some(pattern)) => pattern.target(),
            _ => 0.5,
        };
        self.level.unwrap_or(own)
    }

    /// Whether these settings are of another kind or schedule than the section's, so that times of the section do not
    /// hold for them.
    pub(in crate::train) fn has_other_times(&self, section: &SparsifierSettings) -> bool {
        let other_kind = self.kind.is_some_and(|kind| Some(kind) != section.kind);
        other_kind || self.schedule.is_some_and(|schedule| schedule != section.schedule.unwrap_or_default())
    }

    /// These settings over those of the section. With another kind, what describes the section's rule does not hold;
    /// with another schedule, what describes that.
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
        self.or(base)
    }

    /// The settings of a section, where there is one.
    pub(in crate::train) fn read_present(section: &mut Section<'_>, m: &mut Mistakes) -> Option<Self> {
        section.is_present().then(|| Self::read(section, m))
    }
}
