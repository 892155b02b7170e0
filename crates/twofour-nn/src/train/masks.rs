//! The masks that methods choose themselves, in the loop.

use twofour::{Mask, MatrixRef};

use super::{
    SparsityPlan, Trainer, TrainingData,
    methods::{HostMasks, METHODS, MaskedLayer, Method, Rounded, WeightOnHost},
};
use crate::{
    Error, Result,
    engine::{AdamWStep, Engine},
    linear::{LayerForm, Linear},
    model::ModelParts,
};

/// The masks of all layers of a method.
#[derive(Debug)]
pub(super) struct MethodMasks {
    method: Method,
    pub(super) masks: Box<dyn HostMasks>,
}

impl MethodMasks {
    /// Returns the masks of a method.
    pub(super) fn of(all: &mut [MethodMasks], method: Method) -> Option<&mut (dyn HostMasks + 'static)> {
        all.iter_mut().find(|own| own.method == method).map(|own| &mut *own.masks)
    }
}

/// The masks of each method of a plan that chooses them itself.
pub(super) fn masks_of<E: Engine>(
    plan: &SparsityPlan,
    model: &impl ModelParts<E>,
    seed: u64,
) -> Result<Vec<MethodMasks>> {
    let mut all = vec![];
    for &method in METHODS.iter().filter(|method| method.sparse_form() == LayerForm::Masked) {
        let of_method = |linear: &'_ Linear<E>| {
            let plan = plan.part_of(linear.name()).filter(|part| part.method == method)?;
            Some((plan, (linear.out_features(), linear.in_features())))
        };
        let linears: Vec<_> = model.linears().collect();
        let layers: Vec<_> = linears
            .iter()
            .filter_map(|linear| {
                let (plan, shape) = of_method(linear)?;
                Some(MaskedLayer { plan, weight: linear.weight().name(), shape })
            })
            .collect();
        if !layers.is_empty() {
            all.extend(method.masks(&layers, seed)?.map(|masks| MethodMasks { method, masks }));
        }
    }
    Ok(all)
}

/// Chooses the mask of a layer after so many steps; returns it with the number of elements that changed.
pub(super) fn choose<E: Engine>(
    engine: &E,
    masks: &mut dyn HostMasks,
    (steps_done, loss_scale, step): (u64, f32, Option<&AdamWStep>),
    linear: &Linear<E>,
) -> Result<(Mask, u64)> {
    let name = linear.weight().name();
    let master = engine.read(linear.weight().master())?;
    let gradient = linear.weight().gradient().filter(|_| masks.reads_gradient(name));
    let mut gradient = gradient.map(|gradient| engine.read(gradient)).transpose()?;
    gradient.iter_mut().flatten().for_each(|element| *element /= loss_scale);
    let master = MatrixRef::new(linear.out_features(), linear.in_features(), &master)?;
    masks.choose(&WeightOnHost { name, master, gradient: gradient.as_deref(), step }, steps_done)
}

/// Makes a layer masked, and rounded where it is, as its method has it.
pub(super) fn apply<E: Engine>(
    engine: &E,
    linear: &mut Linear<E>,
    (part, masks): (&SparsityPlan, &dyn HostMasks),
) -> Result<()> {
    let name = linear.weight().name();
    let no_mask = || Error::from(twofour::Error::NoParameter { name: name.to_owned() });
    let mask = masks.mask(name).ok_or_else(no_mask)?.clone();
    match masks.rounding(name) {
        Some(Rounded { scales, largest }) => linear.make_rounded(engine, &scales, largest),
        None => linear.make_masked(engine, mask, part.method.masking(part)),
    }
}

/// The layers whose masks were chosen after a step, by their index in the model's order, with the elements that
/// changed.
pub(super) type Chosen = Vec<(usize, u64)>;

impl<E: Engine, D: TrainingData> Trainer<E, D> {
    /// Chooses the masks that are due after the steps done, but for those of layers that have just `changed` their
    /// form. The gradients of the last step are times `loss_scale`; its optimizer had the numbers of `optimizer`.
    pub(super) fn choose_masks(
        &mut self,
        changed: &[usize],
        loss_scale: f32,
        optimizer: Option<&AdamWStep>,
    ) -> Result<Chosen> {
        let step = self.progress.step;
        let Trainer { engine, model, plan, parts, masks, .. } = self;
        let mut chosen = vec![];
        for (index, linear) in model.linears_mut().enumerate() {
            let part = parts.get(linear.name()).and_then(|&part| plan.parts().nth(part));
            let Some(part) = part.filter(|part| part.selects_mask_after(step)) else { continue };
            if linear.form() != LayerForm::Masked || changed.contains(&index) {
                continue;
            }
            let Some(own) = MethodMasks::of(masks, part.method) else { continue };
            let (mask, flips) = choose(engine, own, (step, loss_scale, optimizer), linear)?;
            if part.method.freezes_model() {
                if let Some(weight) = own.take_weight(linear.weight().name()) {
                    linear.weight_mut().write(engine, &weight)?;
                }
                continue;
            }
            linear.set_mask(engine, mask)?;
            chosen.push((index, flips));
        }
        Ok(chosen)
    }

    /// Adds what trains beside frozen weights to them, under the masks of their zeros; returns the name of each layer
    /// with the norm of the update by that of the weight, and that of what zeros lose by that of the update. For the
    /// end of a run: a checkpoint of the trainer has to be saved before.
    ///
    /// # Errors
    /// Those of the engine.
    pub fn merge_adapters(&mut self) -> Result<Vec<(String, [f64; 2])>> {
        let Trainer { engine, model, masks, .. } = self;
        let mut all = vec![];
        for linear in model.linears_mut() {
            let of = |own: &MethodMasks| own.masks.merged(linear.weight().name()).transpose();
            let Some(merged) = masks.iter().find_map(of).transpose()? else { continue };
            linear.weight_mut().write(engine, &merged.weight)?;
            linear.set_mask(engine, merged.mask)?;
            all.push((linear.name().to_owned(), [merged.update, merged.lost]));
        }
        Ok(all)
    }
}
