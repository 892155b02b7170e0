//! Dense until variances have settled, then hard threshold with frozen variances (STEP; Lu et al., ICML 2023).

use serde::{Deserialize, Serialize};

use super::{Method, SparseBegin, SparsityPlan, SparsitySettings, TrainingMethod, step_of};
use crate::{
    Result,
    settings::{Named, OwnKind, OwnSetting},
};

pub(super) const METHOD: Method = Method { name: "step", method: &Step };

/// The share of all steps after which layers are 2:4 at the latest.
pub(super) const LATEST: OwnSetting = OwnSetting {
    key: "switch_latest",
    kind: OwnKind::Number("a share from 0 to 1", |share| (0.0..=1.0).contains(&share)),
    default: None,
    elsewhere: "only \"step\" switches by itself",
};

/// The mean of changes by which it switches.
const MEAN: OwnSetting = OwnSetting {
    key: "switch_mean",
    kind: OwnKind::Word(&["arithmetic", "geometric"]),
    default: None,
    elsewhere: "only \"step\" switches by itself",
};

/// The mean of second moments' changes by which [`Method::STEP`] decides that they have settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SwitchMean {
    /// The mean of magnitudes (option 1 of the paper).
    #[default]
    Arithmetic,
    /// The exponential of the mean of their logarithms (option 2).
    Geometric,
}

impl Named for SwitchMean {
    const ALL: &'static [(&'static str, Self)] =
        &[("arithmetic", SwitchMean::Arithmetic), ("geometric", SwitchMean::Geometric)];
}

struct Step;

impl TrainingMethod for Step {
    fn defaults(&self, plan: &mut SparsityPlan, steps: u64) {
        plan.begin = SparseBegin::Settled { earliest: steps / 10, latest: steps / 2 };
    }

    fn has(&self) -> &'static [&'static str] {
        &["defaults"]
    }

    fn excludes(&self) -> &'static [(&'static str, &'static str)] {
        &[("mask_every", "its mask is chosen at every step")]
    }

    fn own(&self) -> &'static [OwnSetting] {
        &[LATEST, MEAN]
    }

    fn begin(&self, settings: &SparsitySettings, default: SparseBegin, steps: u64) -> SparseBegin {
        let SparseBegin::Settled { earliest, latest } = default else { return default };
        let earliest = settings.begin.map_or(earliest, |share| step_of(share, steps));
        let given = settings.own.number(LATEST.key).map(|share| step_of(share, steps));
        SparseBegin::Settled { earliest, latest: given.unwrap_or(latest.max(earliest)) }
    }

    fn resolve(&self, plan: &mut SparsityPlan, settings: &SparsitySettings, _: u64) -> Result<()> {
        let word = settings.own.word(MEAN.key);
        let mean = SwitchMean::ALL.iter().find(|(name, _)| Some(*name) == word);
        plan.switch_mean = mean.map_or(plan.switch_mean, |(_, mean)| *mean);
        Ok(())
    }

    fn watches(&self) -> bool {
        true
    }
}
