//! The mask of the first weights, kept; the gradient is masked. The zeros of a model that training starts from are
//! kept.

use twofour::layer::WeightGradient;

use super::{Method, SparsityPlan, TrainingMethod};

pub(super) const METHOD: Method = Method { name: "fixed", method: &Fixed };

struct Fixed;

impl TrainingMethod for Fixed {
    fn defaults(&self, plan: &mut SparsityPlan, _: u64) {
        plan.weight_gradient = WeightGradient::Masked;
        plan.mask_every = 0;
    }

    fn excludes(&self) -> &'static [(&'static str, &'static str)] {
        &[("mask_every", "its mask is chosen once")]
    }

    fn refuses(&self, gradient: WeightGradient) -> Option<&'static str> {
        let is_mvue = matches!(gradient, WeightGradient::Mvue | WeightGradient::MvueApproximate);
        is_mvue.then_some("MVUE is for gradients of pruned elements too")
    }

    fn keeps_zeros(&self) -> bool {
        true
    }
}
