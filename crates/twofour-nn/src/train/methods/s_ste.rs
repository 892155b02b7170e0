//! Soft threshold with a frozen scale (S-STE; Hu et al., NeurIPS 2024).

use twofour::layer::{MaskRule, WeightGradient};

use super::{CheckedPart, Method, Rules, SparsityPlan, TrainingMethod};
use crate::settings::Mistakes;

pub(super) const METHOD: Method = Method { name: "s-ste", method: &SoftSte };

struct SoftSte;

impl TrainingMethod for SoftSte {
    fn defaults(&self, plan: &mut SparsityPlan, _: u64) {
        plan.rule = MaskRule::SoftThreshold;
    }

    fn toolkit_defaults(&self, plan: &mut SparsityPlan) {
        plan.weight_gradient = WeightGradient::MvueApproximate;
    }

    fn has(&self) -> &'static [&'static str] {
        &["defaults"]
    }

    fn rules(&self) -> Rules {
        Rules::Soft
    }

    fn check(&self, part: &CheckedPart<'_>, m: &mut Mistakes) {
        if part.settings.mask_every.is_some_and(|every| every != 1) {
            part.exclude(
                m,
                "mask_every",
                "the soft threshold's mask and values are one, so it is chosen at every step",
            );
        }
    }
}
