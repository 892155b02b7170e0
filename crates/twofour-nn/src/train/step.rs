//! A training step: what is launched, and what is read afterwards.

use std::{
    collections::HashMap,
    fmt::Debug,
    hash::{DefaultHasher, Hash, Hasher},
};

use twofour::{adamw_step::PhaseSwitch, layer::Accumulate};

use super::{
    OptimizerKind, SparsityPlan, Trainer, TrainingData, TrainingSettings, forms::Refresh, methods::SwitchMean,
    ranks::Seat, teacher::Teacher,
};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::{
        AdamWStep, Engine, OptimizerStep, PrunedDecay, SecondMoment, SgdStep, StepFindings, StepLimits, StepPhase,
    },
    linear::LayerForm,
    model::{ModelPart, ModelParts as _, Objective, TrainedModel},
    parameter::Parameter,
};

/// What came of launching a step.
pub(super) enum Launched {
    /// Everything, with the sum of the changes of watched second moments.
    Done { changes: f64 },
    /// An estimate of a gradient was refused because the gradient is not finite; no update was launched.
    Refused,
}

/// Whether an estimate of a gradient was refused because the gradient is not finite.
fn is_not_finite(error: &Error) -> bool {
    match error {
        Error::Core(twofour::Error::NotANumber { .. } | twofour::Error::Infinite { .. }) => true,
        Error::Operation(error) => error.is_not_finite(),
        Error::InLayer { source, .. } => is_not_finite(source),
        _ => false,
    }
}

impl<E: Engine, D: TrainingData> Trainer<E, D> {
    /// Samples of a micro-batch.
    fn micro_batch(&self) -> BatchShape {
        let TrainingSettings { batch, micro_batch, .. } = self.settings;
        let share = batch / self.ranks();
        BatchShape { batch: micro_batch.unwrap_or(share).min(share), positions: self.model.positions() }
    }

    /// Trainers that divide each batch.
    fn ranks(&self) -> usize {
        self.seat.as_ref().map_or(1, |seat| seat.rank().count())
    }

    /// Brings this rank's share of the batch of a step to the engine; returns the number of targets of the whole batch.
    pub(super) fn upload(&mut self, step: u64) -> Result<usize> {
        let shape = self.micro_batch();
        let (index, ranks) = (self.seat.as_ref().map_or(0, |seat| seat.rank().index()), self.ranks());
        let Trainer { engine, model, data, settings, micro_batches, .. } = self;
        let whole = BatchShape { batch: settings.batch, ..shape };
        let batch = data.batch(whole, settings.seed, step);
        let share = |all: &'_ [u32]| {
            let share = all.len() / ranks;
            (index * share..(index + 1) * share, all.len() / whole.batch * shape.batch)
        };
        let ((inputs, inputs_at_once), (targets, targets_at_once)) = (share(&batch.inputs), share(&batch.targets));
        let parts = batch.inputs[inputs].chunks(inputs_at_once).zip(batch.targets[targets].chunks(targets_at_once));
        for (index, (inputs, targets)) in parts.enumerate() {
            if index == micro_batches.len() {
                micro_batches.push(None);
            }
            model.upload(engine, (inputs, targets), shape, &mut micro_batches[index])?;
        }
        Ok(batch.targets.len())
    }

    /// Launches all work of a step: passes, clipping, update, and the packed weights of the next step. The guard
    /// decides whether the update happens, where the gradients are. The engine may repeat what an earlier step of the
    /// same kind launched. `targets` are those of the whole batch.
    pub(super) fn launch(&mut self, learning_rate: f64, refreshes: &[Refresh], targets: usize) -> Result<Launched> {
        let (shape, update) = (self.micro_batch(), self.progress.updates + 1);
        let steps = self.numbers(learning_rate, update);
        let repeats = self.can_repeat(&steps);
        let layers: Vec<_> = self.model.linears().map(|linear| (linear.form(), linear.observed().is_some())).collect();
        let Trainer { engine, model, teacher, loss, guard, micro_batches, parts, settings, progress, seat, .. } = self;
        let limits = StepLimits { clip_norm: settings.clip_norm, loss_scale: progress.loss_scale.scale() };
        let key = key_of(&(shape, micro_batches.len(), targets, limits, refreshes, layers), &steps);
        let launched = Launched::Done { changes: 0.0 };
        let mut launch = StepLaunch {
            engine,
            model,
            teacher: teacher.as_mut(),
            loss,
            guard,
            micro_batches,
            parts,
            shape,
            targets,
            limits,
            steps,
            refreshes,
            launched,
            seat: seat.as_mut(),
        };
        if repeats {
            engine.repeat(key, Some((learning_rate, update)), || launch.run())?;
        } else {
            launch.run()?;
        }
        Ok(launch.launched)
    }

    /// Whether all that a step launches can be captured and repeated. The change of a watched second moment is read
    /// while the step is launched, sums over ranks are begun once, the numbers of gradient descent come with each
    /// launch, and all weights of a step that is repeated have one learning rate.
    fn can_repeat(&self, steps: &Steps) -> bool {
        let step = self.progress.step;
        if !self.plan.parts().all(|part| part.method.trains_weights(part, step)) {
            return false;
        }
        let is_repeatable = |step: &OptimizerStep| match step {
            OptimizerStep::AdamW(step) => {
                // The share of a decay of moments changes with each step.
                matches!(step.second_moment, SecondMoment::Moving | SecondMoment::Frozen { .. })
                    && !matches!(step.pruned_decay, PrunedDecay::Moment { .. })
            }
            OptimizerStep::Sgd(_) => false,
        };
        self.seat.is_none() && steps.of_parts.iter().chain([&steps.other]).all(is_repeatable)
    }

    /// The numbers of the optimizer's step.
    fn numbers(&self, learning_rate: f64, step: u64) -> Steps {
        let TrainingSettings { optimizer, momentum, beta1, beta2, epsilon, weight_decay, .. } = self.settings;
        let switch = self.progress.switch.as_ref();
        let second_moment = match switch.map(PhaseSwitch::switched_at) {
            Some(None) => match self.plan.switch_mean {
                SwitchMean::Arithmetic => SecondMoment::Watched,
                SwitchMean::Geometric => SecondMoment::WatchedByLogarithm,
            },
            // Until STEP's own layers are dense again, whatever those of overrides are.
            Some(Some(at)) if self.plan.form_at(self.progress.step, true) == LayerForm::TwoOfFour => {
                SecondMoment::Frozen { at }
            }
            _ => SecondMoment::Moving,
        };
        let of = |learning_rate, second_moment, pruned_decay| match optimizer {
            OptimizerKind::Sgd => {
                OptimizerStep::Sgd(SgdStep { learning_rate, momentum, weight_decay, gradient_scale: 1.0, pruned_decay })
            }
            OptimizerKind::Adamw => OptimizerStep::AdamW(AdamWStep {
                learning_rate,
                beta1,
                beta2,
                epsilon,
                weight_decay,
                step,
                gradient_scale: 1.0,
                second_moment,
                pruned_decay,
            }),
        };
        let of_part = |(index, part): (usize, &SparsityPlan)| {
            // STEP is the method of the plan itself, not of its overrides.
            let second_moment = if index == 0 { second_moment } else { SecondMoment::Moving };
            let trains = part.method.trains_weights(part, self.progress.step);
            let rate = if trains { learning_rate } else { 0.0 };
            of(rate, second_moment, part.method.pruned_decay(part, self.progress.step))
        };
        Steps {
            of_parts: self.plan.parts().enumerate().map(of_part).collect(),
            other: of(learning_rate, SecondMoment::Moving, PrunedDecay::None),
        }
    }

    /// The numbers of AdamW in the update that was just done, for what trains on the host, where the norm of all
    /// gradients was `norm`; none of another optimizer.
    pub(super) fn optimizer_numbers(&self, learning_rate: f64, norm: f64) -> Option<AdamWStep> {
        let OptimizerStep::AdamW(step) = self.numbers(learning_rate, self.progress.updates).other else { return None };
        let clip = self.settings.clip_norm;
        let is_clipped = clip > 0.0 && clip.is_finite() && norm > clip;
        Some(AdamWStep { gradient_scale: if is_clipped { (clip / norm) as f32 } else { 1.0 }, ..step })
    }

    /// Reads what the step found: the only time that it waits for the engine.
    pub(super) fn findings(&mut self, launched: &Launched, refreshes: &[Refresh]) -> Result<StepFindings> {
        if let Launched::Refused = launched {
            return Ok(StepFindings { loss: f64::NAN, norm: f64::NAN, flips: vec![] });
        }
        let Trainer { engine, model, guard, .. } = self;
        let layers: Vec<_> = Self::flipping(model, refreshes).collect();
        Ok(engine.findings(guard, &layers)?)
    }

    /// STEP's decision to switch, after an update.
    pub(super) fn observe(&mut self, launched: &Launched) {
        let (Some(switch), Launched::Done { changes }) = (&mut self.progress.switch, launched) else { return };
        let planned = self.model.linears().filter(|linear| self.parts.get(linear.name()) == Some(&0));
        let elements = planned.map(|linear| linear.out_features() * linear.in_features()).sum();
        switch.advance();
        switch.observe(*changes, elements, self.settings.epsilon);
    }
}

/// The numbers of an optimizer's step.
#[derive(Debug)]
struct Steps {
    /// For the weights of each part of the plan.
    of_parts: Vec<OptimizerStep>,
    /// For other matrices.
    other: OptimizerStep,
}

/// The work of a step over the parts of a trainer.
struct StepLaunch<'a, E: Engine, M: TrainedModel<E>> {
    engine: &'a E,
    model: &'a mut M,
    teacher: Option<&'a mut Teacher<M>>,
    loss: &'a mut E::Buffer,
    guard: &'a mut E::StepGuard,
    micro_batches: &'a [Option<M::Uploaded>],
    /// The part of the plan that each planned layer belongs to, by the layer's name.
    parts: &'a HashMap<String, usize>,
    shape: BatchShape,
    /// Targets of the whole batch.
    targets: usize,
    limits: StepLimits,
    steps: Steps,
    /// The refresh of each linear layer.
    refreshes: &'a [Refresh],
    launched: Launched,
    seat: Option<&'a mut Seat<E>>,
}

impl<E: Engine, M: TrainedModel<E>> StepLaunch<'_, E, M> {
    fn run(&mut self) -> Result<()> {
        match self.passes() {
            Err(error) if is_not_finite(&error) => {
                self.launched = Launched::Refused;
                return Ok(());
            }
            passed => passed?,
        }
        self.engine.begin_phase(StepPhase::Update)?;
        self.judge()?;
        let changes = self.update()?;
        self.engine.begin_phase(StepPhase::Masks)?;
        let (engine, guard) = (self.engine, &*self.guard);
        let mut layers = vec![];
        for (linear, refresh) in self.model.linears_mut().zip(self.refreshes) {
            let selects_mask = match refresh {
                Refresh::ChangesForm => None,
                Refresh::Packs => Some(false),
                Refresh::SelectsMask => Some(true),
            };
            layers.extend(linear.refreshes(engine, selects_mask)?);
        }
        engine.refresh(layers, guard)?;
        self.engine.begin_phase(StepPhase::Rest)?;
        self.launched = Launched::Done { changes };
        Ok(())
    }

    /// The passes of all micro-batches.
    fn passes(&mut self) -> Result<()> {
        let StepLaunch { engine, model, teacher, loss, micro_batches, shape, targets, limits, seat, .. } = self;
        let scale = limits.loss_scale / *targets as f32;
        engine.clear(loss)?;
        let mut accumulate = Accumulate::Overwrite;
        let last = micro_batches.len().saturating_sub(1);
        for (index, batch) in micro_batches.iter().flatten().enumerate() {
            engine.begin_phase(StepPhase::Forward)?;
            let mut ready = |gradients: Vec<&mut E::Buffer>| match seat {
                Some(Seat { reduction, rank }) if index == last => reduction.ready(rank, gradients),
                _ => Ok(()),
            };
            let objective = teacher.as_mut().map_or(Objective::Targets, |teacher| teacher.objective());
            let batch = (batch, objective);
            let outcome = model.gradients_of(engine, batch, *shape, (scale, accumulate), loss, &mut ready);
            match (outcome, &mut *seat) {
                (Err(error), Some(Seat { reduction, rank })) if is_not_finite(&error) => {
                    reduction.refuse(rank)?;
                    break;
                }
                (outcome, _) => outcome?,
            }
            accumulate = Accumulate::Add;
        }
        seat.as_mut().map_or(Ok(()), |Seat { reduction, rank }| reduction.finish(rank, loss))
    }

    /// The guard's decision about the update.
    fn judge(&mut self) -> Result<()> {
        // Matrices first, then vectors: the order that sums are taken in.
        let parameters = self.model.parameters();
        let (matrices, vectors): (Vec<&Parameter<E>>, Vec<_>) = parameters.iter().partition(|p| p.shape().len() >= 2);
        let gradients: Vec<&E::Buffer> = matrices.iter().chain(&vectors).filter_map(|p| p.gradient()).collect();
        Ok(self.engine.judge(&gradients, self.loss, self.limits, self.guard)?)
    }

    /// The optimizer's step, unless the guard skips it. Returns the sum of the changes of watched second moments.
    fn update(&mut self) -> Result<f64> {
        let StepLaunch { engine, model, guard, parts, steps, .. } = self;
        let step = |parameter: &Parameter<E>, linear: Option<&str>| {
            let part = linear.and_then(|name| parts.get(name));
            let own = *part.and_then(|&part| steps.of_parts.get(part)).unwrap_or(&steps.other);
            match own {
                own if parameter.shape().len() >= 2 => own,
                OptimizerStep::AdamW(own) => OptimizerStep::AdamW(AdamWStep { weight_decay: 0.0, ..own }),
                OptimizerStep::Sgd(own) => OptimizerStep::Sgd(SgdStep { weight_decay: 0.0, ..own }),
            }
        };
        let is_vector = |parameter: &Parameter<E>| parameter.shape().len() < 2;
        let mut changes = 0.0;
        // Vectors are many and short: each of them alone would take longer than its bytes.
        let mut vectors: Vec<_> = model.parameters_mut().into_iter().filter(|parameter| is_vector(parameter)).collect();
        for alike in vectors.chunk_by_mut(|a, b| step(a, None) == step(b, None)) {
            let own = step(alike[0], None);
            changes += Parameter::update_together(alike, *engine, &own, guard)?;
        }
        let (mut others, mut linears) = (vec![], vec![]);
        model.visit_mut(&mut |part| match part {
            ModelPart::Parameter(parameter) if is_vector(parameter) => {}
            ModelPart::Parameter(parameter) => others.push(parameter),
            ModelPart::Linear(linear) => linears.push(linear),
        });
        for parameter in others {
            changes += parameter.update(*engine, &step(parameter, None), None, guard)?;
        }
        for linear in linears {
            let own = step(linear.weight(), Some(linear.name()));
            changes += linear.update_weight(*engine, &own, guard)?;
        }
        Ok(changes)
    }
}

/// The key of a kind of step: of everything that its calls are given, but for AdamW's learning rate and the number of
/// the update.
fn key_of(kind: &impl Debug, steps: &Steps) -> u64 {
    let steps = steps.of_parts.iter().chain([&steps.other]).map(|step| match *step {
        OptimizerStep::AdamW(step) => OptimizerStep::AdamW(AdamWStep { learning_rate: 0.0, step: 0, ..step }),
        step @ OptimizerStep::Sgd(_) => step,
    });
    let steps: Vec<_> = steps.collect();
    let mut hasher = DefaultHasher::new();
    format!("{kind:?} {steps:?}").hash(&mut hasher);
    hasher.finish()
}
