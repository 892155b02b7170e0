//! The straight-through estimator with decay of pruned weights (Zhou et al., ICLR 2021).

use super::{Decay, Method, SparsityPlan, TrainingMethod};

pub(super) const METHOD: Method = Method { name: "sr-ste", method: &SrSte };

struct SrSte;

impl TrainingMethod for SrSte {
    fn defaults(&self, plan: &mut SparsityPlan, _: u64) {
        plan.decay = Some(Decay::PUBLISHED);
    }

    fn has(&self) -> &'static [&'static str] {
        &["decay", "decay_target", "decay_grid", "decay_trial_steps", "two_of_four_from"]
    }
}
