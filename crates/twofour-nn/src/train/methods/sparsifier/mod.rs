//! Masks of any pattern, whose level follows a schedule, in dense GEMMs: a
//! [`Sparsifier`](twofour::sparsify::Sparsifier) inside the training loop.

mod check;
mod criterion;
mod level;
mod masks;
mod plan;
mod rule;
mod settings;

use twofour::layer::WeightGradient;

use super::{
    CheckedPart, HostMasks, MaskedLayer, Method, SparseBegin, SparsityPlan, SparsitySettings, TrainingMethod, conflict,
};
use crate::{
    Error, Result,
    linear::{LayerForm, Masking, SparsePrecision},
    settings::Mistakes,
};
pub use criterion::SparsifierCriterion;
pub use level::LevelSchedule;
use masks::SparsifierMasks;
pub use plan::SparsifierPlan;
pub use rule::{BlockNorm, PatternText, SparsifierRule};
pub use settings::{LevelScheduleKind, SparsifierKind, SparsifierSettings};

pub(super) const METHOD: Method = Method { name: "sparsifier", method: &Masks };

struct Masks;

impl TrainingMethod for Masks {
    fn defaults(&self, plan: &mut SparsityPlan, steps: u64) {
        plan.sparsifier = Some(SparsifierPlan::TWO_OF_FOUR);
        plan.mask_every = (steps / 100).max(1);
    }

    fn excludes(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("mask", "its masks are those of the kind in [sparsity.sparsifier]"),
            ("precision", "its GEMMs are in the precision of activations"),
            ("observe", "its own masks are measured whenever they are chosen"),
        ]
    }

    fn refuses(&self, gradient: WeightGradient) -> Option<&'static str> {
        let is_mvue = matches!(gradient, WeightGradient::Mvue | WeightGradient::MvueApproximate);
        is_mvue.then_some("its GEMMs are dense; \"dense\" and \"masked\" are for it")
    }

    fn check(&self, part: &CheckedPart<'_>, m: &mut Mistakes) {
        part.check_sparsifier(m);
    }

    fn begin(&self, settings: &SparsitySettings, _: SparseBegin, steps: u64) -> SparseBegin {
        let own = settings.sparsifier.clone().unwrap_or_default();
        let given = settings.begin.map(|share| super::step_of(share, steps));
        SparseBegin::Step(given.unwrap_or_else(|| SparsifierPlan::default_begin(&own, steps)))
    }

    fn resolve(&self, plan: &mut SparsityPlan, settings: &SparsitySettings, steps: u64) -> Result<()> {
        let own = settings.sparsifier.clone().unwrap_or_default();
        if settings.mask_every.is_none() {
            plan.mask_every = SparsifierPlan::default_mask_every(&own, steps);
        }
        let SparseBegin::Step(begin) = plan.begin else { return Ok(()) };
        let sparsifier = SparsifierPlan::new(&own, begin, steps)?;
        if sparsifier.in_place && settings.weight_gradient.is_none() {
            plan.weight_gradient = WeightGradient::Masked;
        }
        plan.sparsifier = Some(sparsifier);
        Ok(())
    }

    fn check_plan(&self, plan: &SparsityPlan) -> Result<()> {
        let Some(own) = &plan.sparsifier else {
            let (what, found) = ("the plan of the method `sparsifier`", "without masks".to_owned());
            return Err(Error::Setting { what, found, expected: "one with the rule of its masks" });
        };
        own.check()?;
        let is_plain = plan.decay.is_none() && !plan.observes && plan.precision == SparsePrecision::Activations;
        if !is_plain || !matches!(plan.weight_gradient, WeightGradient::Dense | WeightGradient::Masked) {
            let reason = "its layers are dense GEMMs under a mask";
            return Err(conflict("the method `sparsifier`", "decay, observed masks, 8-bit floats or MVUE", reason));
        }
        if own.criterion.reads_gradient() && plan.begin == SparseBegin::Step(0) {
            let reason = "they are chosen by the gradient of the step before";
            return Err(conflict("the criterion `saliency`", "masks from step 0", reason));
        }
        if own.in_place && plan.weight_gradient == WeightGradient::Dense {
            let reason = "what is pruned stays zero, so its gradient is masked";
            return Err(conflict("masks in place", "a dense weight gradient", reason));
        }
        Ok(())
    }

    fn sparse_form(&self) -> LayerForm {
        LayerForm::Masked
    }

    fn masking(&self, plan: &SparsityPlan) -> Masking {
        match (&plan.sparsifier, plan.weight_gradient) {
            (Some(SparsifierPlan { in_place: true, .. }), _) => Masking::InPlace,
            (_, WeightGradient::Masked) => Masking::Masked,
            _ => Masking::StraightThrough,
        }
    }

    fn masks(&self, layers: &[MaskedLayer<'_>], _: u64) -> Result<Option<Box<dyn HostMasks>>> {
        Ok(Some(Box::new(SparsifierMasks::new(layers)?)))
    }

    fn chooses_at(&self, plan: &SparsityPlan, steps_done: u64) -> bool {
        plan.sparsifier.as_ref().is_some_and(|own| own.schedule.chooses_at(steps_done))
    }

    fn prunes(&self, plan: &SparsityPlan) -> Option<String> {
        plan.sparsifier.as_ref().map(ToString::to_string)
    }
}
