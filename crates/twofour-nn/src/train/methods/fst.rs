//! Transposable masks, masked decay on gradients, MVUE weight gradients, the last sixth dense (FST; Hu et al., ICML
//! 2024).

use twofour::{
    layer::{MaskRule, WeightGradient},
    select::Transposable,
};

use super::{Decay, Method, Rules, SparsityPlan, TrainingMethod};

pub(super) const METHOD: Method = Method { name: "fst", method: &Fst };

struct Fst;

impl TrainingMethod for Fst {
    fn defaults(&self, plan: &mut SparsityPlan, steps: u64) {
        plan.rule = MaskRule::Transposable(Transposable::GreedyAbs);
        plan.mask_every = SparsityPlan::TRANSPOSABLE_MASK_EVERY;
        plan.weight_gradient = WeightGradient::Mvue;
        plan.decay = Some(Decay::PUBLISHED);
        plan.end = Some(steps - steps / 6);
    }

    fn toolkit_defaults(&self, plan: &mut SparsityPlan) {
        plan.rule = MaskRule::Transposable(Transposable::Optimal);
        plan.weight_gradient = WeightGradient::MvueApproximate;
        plan.decay = plan.decay.map(|decay| Decay { strength: SparsityPlan::TOOLKIT_DECAY, ..decay });
    }

    fn has(&self) -> &'static [&'static str] {
        &["decay", "decay_target", "decay_grid", "decay_trial_steps", "two_of_four_from", "defaults"]
    }

    fn rules(&self) -> Rules {
        Rules::Transposable
    }
}
