//! Hard threshold in two stages: three of four, then two of four (structure decay; Kao et al., "Training Recipe for N:M
//! Structured Sparsity with Decaying Pruning Mask", 2022).

use super::{Method, SparseBegin, SparsityPlan, TrainingMethod};

pub(super) const METHOD: Method = Method { name: "gradual", method: &Gradual };

struct Gradual;

impl TrainingMethod for Gradual {
    fn defaults(&self, plan: &mut SparsityPlan, steps: u64) {
        plan.begin = SparseBegin::Step(steps / 10);
        plan.two_of_four_from = Some(3 * steps / 10);
    }

    fn has(&self) -> &'static [&'static str] {
        &["two_of_four_from"]
    }
}
