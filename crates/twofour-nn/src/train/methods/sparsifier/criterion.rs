//! What a sparsifier's rule compares: the scores of one of the core's [criteria](twofour::criterion).

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use twofour::criterion::{Criterion, Saliency, scores};

use super::super::WeightOnHost;
use crate::settings::Named;

/// The name of one of the core's [criteria](twofour::criterion).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SparsifierCriterion {
    /// [`Magnitude`](twofour::criterion::Magnitude): the weight.
    #[default]
    Magnitude,
    /// [`Saliency`]: the weight times its gradient in the step before.
    Saliency,
}

impl Named for SparsifierCriterion {
    const ALL: &'static [(&'static str, Self)] =
        &[("magnitude", SparsifierCriterion::Magnitude), ("saliency", SparsifierCriterion::Saliency)];
}

impl SparsifierCriterion {
    /// Whether it scores by the gradient of the step before.
    pub(super) fn reads_gradient(self) -> bool {
        self == SparsifierCriterion::Saliency
    }

    /// What is added to the words of a rule.
    pub(super) fn what(self) -> &'static str {
        match self {
            SparsifierCriterion::Magnitude => "",
            SparsifierCriterion::Saliency => ", of weights times gradients",
        }
    }

    /// What a rule compares. Where scores are not finite, so that the step was skipped, it is the weight.
    pub(super) fn compared<'a>(self, weight: &WeightOnHost<'a>) -> Cow<'a, [f32]> {
        let own = Cow::Borrowed(weight.master.data());
        let (SparsifierCriterion::Saliency, Some(gradient)) = (self, weight.gradient) else { return own };
        let criterion: &dyn Criterion = &Saliency { gradient };
        match scores(weight.master, criterion) {
            Ok(scores) if scores.iter().all(|score| score.is_finite()) => Cow::Owned(scores),
            _ => own,
        }
    }
}
