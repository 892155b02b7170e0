//! The form of a layer in a step.

use super::{SparseBegin, SparsityPlan};
use crate::{linear::LayerForm, recipe::Method};

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
