//! The form of a layer in a step.

use super::{SparseBegin, SparsityPlan};
use crate::recipe::Method;

/// What a linear layer computes with in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerForm {
    /// The dense weight.
    Dense,
    /// The weight whose groups of four keep their three largest magnitudes (3:4), in a dense GEMM: the stage of gradual pruning between dense and 2:4.
    ThreeOfFour,
    /// The 2:4 weight.
    TwoOfFour,
    /// The weight under a mask of any pattern, in a dense GEMM.
    Masked,
    /// The dense weight, with an input that is pruned to 2:4 at each pass.
    TwoOfFourInput,
}

impl SparsityPlan {
    /// The form of this part's layers in the step of that number, counted from 0. `has_settled` says whether STEP has switched.
    pub fn form_at(&self, step: u64, has_settled: bool) -> LayerForm {
        let has_begun = match self.begin {
            SparseBegin::Step(begin) => step >= begin,
            SparseBegin::Settled { .. } => has_settled,
        };
        if self.method == Method::Dense || !has_begun || self.end.is_some_and(|end| step >= end) {
            LayerForm::Dense
        } else if self.two_of_four_from.is_some_and(|from| step < from) {
            LayerForm::ThreeOfFour
        } else if self.method == Method::Sparsifier {
            LayerForm::Masked
        } else if self.method == Method::Activation {
            LayerForm::TwoOfFourInput
        } else {
            LayerForm::TwoOfFour
        }
    }

    /// The plan itself and its overrides; no layer is in two of them.
    pub fn parts(&self) -> impl Iterator<Item = &SparsityPlan> {
        std::iter::once(self).chain(&self.overrides)
    }

    /// The part that a layer belongs to.
    pub fn part_of(&self, layer: &str) -> Option<&SparsityPlan> {
        self.parts().find(|part| part.layers.iter().any(|name| name == layer))
    }
}
