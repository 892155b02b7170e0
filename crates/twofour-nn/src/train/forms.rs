//! The forms and masks of a trainer's layers, from step to step.

use twofour::layer::MaskRule;

use super::{
    SparsityPlan, Trainer, TrainingData,
    masks::{Chosen, MethodMasks, apply, choose},
};
use crate::{
    Result,
    engine::Engine,
    linear::{LayerForm, Linear},
    model::{ModelParts as _, TrainedModel as _},
    random::Stream,
};

/// What a layer's weight gets after an update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refresh {
    /// Nothing: the layer changes its form, which makes everything anew.
    ChangesForm,
    /// It is packed under the mask as it is, where it is packed at all.
    Packs,
    /// Its mask is selected, and it is packed.
    SelectsMask,
}

impl<E: Engine, D: TrainingData> Trainer<E, D> {
    /// The part of the plan that a layer belongs to.
    pub(super) fn part_of(&self, layer: &str) -> Option<&SparsityPlan> {
        self.parts.get(layer).and_then(|&index| self.plan.parts().nth(index))
    }

    /// Whether STEP has switched.
    fn has_settled(&self) -> bool {
        self.progress.switch.as_ref().is_some_and(|switch| switch.switched_at().is_some())
    }

    /// What each linear layer gets after the update of the step that comes.
    pub(super) fn refreshes(&self) -> Vec<Refresh> {
        let (next, has_settled) = (self.progress.step + 1, self.has_settled());
        let of = |linear: &Linear<E>| match self.part_of(linear.name()) {
            Some(part) if part.form_at(next, has_settled) != linear.form() => Refresh::ChangesForm,
            Some(part) if linear.sparse().is_some() && part.selects_mask_after(next) => Refresh::SelectsMask,
            _ => Refresh::Packs,
        };
        self.model.linears().map(of).collect()
    }

    /// The layers whose flips are read after a step: of each linear layer the mask that was selected, then the one that
    /// is observed.
    pub(super) fn flipping<'a>(
        model: &'a D::Model<E>,
        refreshes: &'a [Refresh],
    ) -> impl Iterator<Item = &'a E::SparseLinear> {
        model.linears().zip(refreshes).flat_map(|(linear, refresh)| {
            let selected = linear.sparse().filter(|_| *refresh == Refresh::SelectsMask);
            selected.into_iter().chain(linear.observed())
        })
    }

    /// Gives the plan's layers the form that the next step requires, where the gradients of the last one are times
    /// `loss_scale`; returns the indices, in the model's order, of those that changed.
    pub(super) fn change_form(&mut self, loss_scale: f32) -> Result<Vec<usize>> {
        let (step, seeds) = (self.progress.step, Stream::new(self.settings.seed, "mvue"));
        let (has_settled, offset) = (self.has_settled(), self.seed_offset());
        let Trainer { engine, model, plan, parts, masks, .. } = self;
        let mut changed = vec![];
        for (index, linear) in model.linears_mut().enumerate() {
            let part = parts.get(linear.name()).and_then(|&part| plan.parts().nth(part));
            let Some(part) = part else { continue };
            if part.observes && linear.observed().is_none() {
                linear.observe(engine, part.layer_settings())?;
            }
            let form = part.form_at(step, has_settled);
            if linear.form() == form {
                continue;
            }
            match form {
                // Seeds of layers are far apart: each weight gradient takes one.
                LayerForm::TwoOfFour => {
                    let seed = (seeds.bits(index as u64) >> 1).wrapping_add(offset);
                    linear.make_sparse_in(engine, part.layer_settings(), part.precision, seed)?;
                }
                LayerForm::ThreeOfFour => linear.make_three_of_four(engine)?,
                LayerForm::Masked => {
                    let Some(own) = MethodMasks::of(masks, part.method) else { continue };
                    choose(engine, own, (step, loss_scale, None), linear)?;
                    apply(engine, linear, (part, &*own))?;
                }
                LayerForm::TwoOfFourInput => {
                    let MaskRule::Transposable(rule) = part.rule else { continue };
                    linear.make_input_sparse(engine, rule)?;
                }
                LayerForm::Dense => linear.make_dense(engine)?,
            }
            changed.push(index);
        }
        if !changed.is_empty() {
            model.clear_workspace();
        }
        Ok(changed)
    }

    /// Flip rates, after the forms of the next step have been given: of the flips that [`Trainer::flipping`]'s layers
    /// have, and of the masks that methods have chosen.
    pub(super) fn flips(&self, found: &[u64], refreshes: &[Refresh], (changed, chosen): (&[usize], &Chosen)) -> Flips {
        let (mut flips, mut layers, mut observed) = (Share::default(), vec![], Share::default());
        let mut found = found.iter().copied();
        let mut selects_any = false;
        for (index, (linear, refresh)) in self.model.linears().zip(refreshes).enumerate() {
            let elements = (linear.out_features() * linear.in_features()) as u64;
            let selects = *refresh == Refresh::SelectsMask;
            let own = if selects { found.next().unwrap_or(0) } else { 0 };
            if let Some(flips) = linear.observed().and_then(|_| found.next()) {
                observed.add(flips, elements);
            }
            if !linear.has_mask() {
                continue;
            }
            let by_method = chosen.iter().find(|(of, _)| *of == index).map(|(_, flips)| *flips);
            // A layer that has just changed its form has the mask of its weight as it is.
            let own = if changed.contains(&index) { 0 } else { by_method.unwrap_or(own) };
            selects_any |= selects || by_method.is_some();
            flips.add(own, elements);
            layers.push(own as f64 / elements.max(1) as f64);
        }
        if !selects_any {
            layers.clear();
        }
        Flips { overall: flips.share(), layers, observed: (observed.of > 0).then(|| observed.share()) }
    }
}

/// Shares of mask elements that changed.
#[derive(Default)]
pub(super) struct Flips {
    pub(super) overall: f64,
    pub(super) layers: Vec<f64>,
    pub(super) observed: Option<f64>,
}

/// A part of a whole, as it is counted.
#[derive(Default)]
struct Share {
    part: u64,
    of: u64,
}

impl Share {
    fn add(&mut self, part: u64, of: u64) {
        self.part += part;
        self.of += of;
    }

    fn share(&self) -> f64 {
        self.part as f64 / self.of.max(1) as f64
    }
}
