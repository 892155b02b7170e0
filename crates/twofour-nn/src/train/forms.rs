//! The forms and masks of a trainer's layers, from step to step.

use twofour::layer::MaskRule;

use super::{LayerForm, SparsityPlan, Trainer};
use crate::{
    Result,
    engine::{Engine, SparseLayer as _},
    random::Stream,
};

impl<E: Engine> Trainer<E> {
    /// The part of the plan that a layer belongs to.
    pub(super) fn part_of(&self, layer: &str) -> Option<&SparsityPlan> {
        self.parts.get(layer).and_then(|&index| self.plan.parts().nth(index))
    }

    /// Gives the plan's layers the form that the next step requires; returns the indices, in the model's order, of those that changed.
    pub(super) fn change_form(&mut self) -> Result<Vec<usize>> {
        let (step, seeds) = (self.progress.step, Stream::new(self.settings.seed, "mvue"));
        let has_settled = self.progress.switch.as_ref().is_some_and(|switch| switch.switched_at().is_some());
        let Trainer { engine, model, plan, parts, .. } = self;
        let mut changed = vec![];
        for (index, linear) in model.linears_mut().enumerate() {
            let part = parts.get(linear.name()).and_then(|&part| plan.parts().nth(part));
            let Some(part) = part else { continue };
            if part.observes && !linear.is_observed() {
                linear.observe(engine, part.layer_settings())?;
            }
            let form = part.form_at(step, has_settled);
            if linear.form() == form {
                continue;
            }
            match form {
                // Seeds of layers are far apart: each weight gradient takes one.
                LayerForm::TwoOfFour => {
                    let seed = seeds.bits(index as u64) >> 1;
                    linear.make_sparse_in(engine, part.layer_settings(), part.precision, seed)?;
                }
                LayerForm::ThreeOfFour => linear.make_three_of_four(engine)?,
                LayerForm::TwoOfFourInput => {
                    let MaskRule::Transposable(rule) = part.rule else { continue };
                    linear.make_input_sparse(engine, rule)?;
                }
                LayerForm::Dense => linear.make_dense(engine)?,
            }
            changed.push(index);
        }
        Ok(changed)
    }

    /// Masks and packed weights of the next step.
    pub(super) fn refresh(&mut self) -> Result<Flips> {
        let changed = self.change_form()?;
        let Trainer { engine, model, plan, parts, progress, .. } = self;
        let (mut flips, mut layers, mut observed) = (Share::default(), vec![], Share::default());
        let mut selects_any = false;
        for (index, linear) in model.linears_mut().enumerate() {
            let part = parts.get(linear.name()).and_then(|&part| plan.parts().nth(part));
            // A layer that has just changed its form has the mask of its weight as it is.
            let selects = part.is_some_and(|part| part.selects_mask_after(progress.step));
            let selects = selects && !changed.contains(&index);
            if !changed.contains(&index) {
                linear.refresh(engine, selects)?;
            }
            linear.refresh_observed()?;
            let elements = (linear.out_features() * linear.in_features()) as u64;
            if let Some(flips) = linear.observed_flips()? {
                observed.add(flips, elements);
            }
            let Some(sparse) = linear.sparse() else { continue };
            let own = if selects { sparse.flips()? } else { 0 };
            selects_any |= selects;
            flips.add(own, elements);
            layers.push(own as f64 / elements.max(1) as f64);
        }
        if !selects_any {
            layers.clear();
        }
        Ok(Flips { overall: flips.share(), layers, observed: (observed.of > 0).then(|| observed.share()) })
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
