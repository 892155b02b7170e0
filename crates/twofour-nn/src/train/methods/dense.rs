//! No layer is 2:4.

use super::{Method, SparsityPlan, TrainingMethod};
use crate::linear::LayerForm;

pub(super) const METHOD: Method = Method { name: "dense", method: &Dense };

struct Dense;

impl TrainingMethod for Dense {
    fn defaults(&self, plan: &mut SparsityPlan, _: u64) {
        plan.layers.clear();
    }

    fn sparse_form(&self) -> LayerForm {
        LayerForm::Dense
    }
}
