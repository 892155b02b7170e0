//! The masks of a trainer's sparsifier.

use twofour::{
    Mask, MatrixRef,
    layer::WeightGradient,
    sparsify::{Regrowth, Sparsifier},
};

use crate::{
    Error, Result,
    engine::Engine,
    linear::{LayerForm, Linear, Masking},
    model::ModelParts,
    recipe::SparsifierCriterion,
    train::{SparsifierPlan, SparsityPlan, Trainer, TrainingData},
};

/// A sparsifier over the layers that a plan gives to one, by the names of their weights; none where there are none.
pub(in crate::train) fn prepared<E: Engine>(
    plan: &SparsityPlan,
    model: &impl ModelParts<E>,
) -> Result<Option<Sparsifier>> {
    // What is masked in place is zero in the dense weight already.
    let mut sparsifier = Sparsifier::new(Regrowth::FromDense);
    for linear in model.linears() {
        let part = plan.part_of(linear.name());
        let Some(own) = part.and_then(|part| part.sparsifier.as_ref()) else { continue };
        let (name, rows, cols) = (linear.weight().name(), linear.out_features(), linear.in_features());
        sparsifier.prepare(name, rows, cols, own.rule, own.level)?;
        // Until the first mask is chosen, nothing is pruned.
        sparsifier.set_level(name, 0.0)?;
    }
    let is_empty = sparsifier.names().next().is_none();
    Ok((!is_empty).then_some(sparsifier))
}

/// What happens to the weights that this part's masks prune.
pub(in crate::train) fn masking_of(part: &SparsityPlan) -> Masking {
    match (&part.sparsifier, part.weight_gradient) {
        (Some(SparsifierPlan { in_place: true, .. }), _) => Masking::InPlace,
        (_, WeightGradient::Masked) => Masking::Masked,
        _ => Masking::StraightThrough,
    }
}

/// What the rule of a layer's masks compares: the master weight as it is, or its products with the gradients of the last step. Where one of those is not finite, so that the step was
/// skipped, it is the weight.
fn compared<E: Engine>(engine: &E, criterion: SparsifierCriterion, linear: &Linear<E>) -> Result<Vec<f32>> {
    let master = engine.read(linear.weight().master())?;
    let (SparsifierCriterion::Saliency, Some(gradient)) = (criterion, linear.weight().gradient()) else {
        return Ok(master);
    };
    let products: Vec<f32> = master.iter().zip(engine.read(gradient)?).map(|(w, g)| w * g).collect();
    Ok(if products.iter().all(|product| product.is_finite()) { products } else { master })
}

/// Chooses the mask of a layer at the level of a step; returns it with the number of elements that changed.
pub(in crate::train) fn choose<E: Engine>(
    engine: &E,
    sparsifier: &mut Sparsifier,
    (plan, step): (&SparsifierPlan, u64),
    linear: &Linear<E>,
) -> Result<(Mask, u64)> {
    let name = linear.weight().name();
    let compared = compared(engine, plan.criterion, linear)?;
    sparsifier.set_level(name, plan.level_at(step))?;
    let matrix = MatrixRef::new(linear.out_features(), linear.in_features(), &compared)?;
    let flips = sparsifier.step_one(name, matrix)?;
    let mask = sparsifier.mask(name).ok_or_else(|| twofour::Error::NoParameter { name: name.to_owned() })?;
    Ok((mask.clone(), flips))
}

/// Makes a layer masked with the mask that the sparsifier has.
pub(in crate::train) fn restore<E: Engine>(
    engine: &E,
    linear: &mut Linear<E>,
    (part, sparsifier): (&SparsityPlan, &Sparsifier),
) -> Result<()> {
    let name = linear.weight().name();
    let no_mask = || Error::from(twofour::Error::NoParameter { name: name.to_owned() });
    let mask = sparsifier.mask(name).ok_or_else(no_mask)?.clone();
    linear.make_masked(engine, mask, masking_of(part))
}

/// The layers whose masks were chosen after a step, by their index in the model's order, with the elements that changed.
pub(in crate::train) type Chosen = Vec<(usize, u64)>;

impl<E: Engine, D: TrainingData> Trainer<E, D> {
    /// Masks and levels of the layers that a sparsifier masks, by the names of their weights; absent where there are none.
    pub fn sparsifier(&self) -> Option<&Sparsifier> {
        self.sparsifier.as_ref()
    }

    /// Chooses the masks that are due after the steps done, but for those of layers that have just `changed` their form.
    pub(in crate::train) fn choose_masks(&mut self, changed: &[usize]) -> Result<Chosen> {
        let step = self.progress.step;
        let Trainer { engine, model, plan, parts, sparsifier, .. } = self;
        let Some(sparsifier) = sparsifier else { return Ok(vec![]) };
        let mut chosen = vec![];
        for (index, linear) in model.linears_mut().enumerate() {
            let part = parts.get(linear.name()).and_then(|&part| plan.parts().nth(part));
            let Some((part, own)) = part.and_then(|part| Some((part, part.sparsifier.as_ref()?))) else { continue };
            if linear.form() != LayerForm::Masked || changed.contains(&index) || !part.selects_mask_after(step) {
                continue;
            }
            let (mask, flips) = choose(engine, sparsifier, (own, step), linear)?;
            linear.set_mask(engine, mask)?;
            chosen.push((index, flips));
        }
        Ok(chosen)
    }
}
