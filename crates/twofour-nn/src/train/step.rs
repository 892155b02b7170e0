//! A training step: what is launched, and what is read afterwards.

use std::{
    collections::HashSet,
    fmt::Debug,
    hash::{DefaultHasher, Hash, Hasher},
};

use twofour::{adamw_step::PhaseSwitch, layer::Accumulate};

use super::{Decay, Trainer, ranks::Seat};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::{AdamWStep, Buffer as _, Engine, Kind, PrunedDecay, SecondMoment, StepFindings, StepLimits, StepPhase},
    linear::Linear,
    model::Gpt,
    parameter::Parameter,
    recipe::{DecayTarget, TrainingSettings},
};

/// What came of launching a step.
pub(super) enum Launched {
    /// Everything, with the sum of the changes of watched second moments.
    Done { changes: f64 },
    /// An estimate of a gradient was refused because the gradient is not finite; no update was launched.
    Refused,
}

/// Shares of mask elements that changed.
#[derive(Default)]
pub(super) struct Flips {
    pub(super) overall: f64,
    pub(super) layers: Vec<f64>,
}

/// Whether an estimate of a gradient was refused because the gradient is not finite.
fn is_not_finite(error: &Error) -> bool {
    match error {
        Error::Core(twofour::Error::NotANumber { .. } | twofour::Error::Infinite { .. }) => true,
        Error::InLayer { source, .. } => is_not_finite(source),
        _ => false,
    }
}

impl<E: Engine> Trainer<E> {
    /// Sequences of a micro-batch.
    fn micro_batch(&self) -> BatchShape {
        let TrainingSettings { batch, micro_batch, .. } = self.settings;
        let share = batch / self.ranks();
        BatchShape { batch: micro_batch.unwrap_or(share).min(share), positions: self.model.config().context }
    }

    /// Trainers that divide each batch.
    fn ranks(&self) -> usize {
        self.seat.as_ref().map_or(1, |seat| seat.rank().count())
    }

    /// Brings this rank's share of the batch of a step to the engine; returns the tokens of the whole batch.
    pub(super) fn upload(&mut self, step: u64) -> Result<usize> {
        let shape = self.micro_batch();
        let index = self.seat.as_ref().map_or(0, |seat| seat.rank().index());
        let share = self.settings.batch / self.ranks() * shape.positions;
        let own = index * share..(index + 1) * share;
        let Trainer { engine, corpus, settings, micro_batches, .. } = self;
        let batch = corpus.batch(settings.seed, step, settings.batch, shape.positions);
        let (inputs, targets) = (&batch.inputs[own.clone()], &batch.targets[own]);
        let parts = inputs.chunks(shape.tokens()).zip(targets.chunks(shape.tokens()));
        for (index, (inputs, targets)) in parts.enumerate() {
            if index == micro_batches.len() {
                micro_batches
                    .push([engine.zeros(Kind::Index, inputs.len())?, engine.zeros(Kind::Index, targets.len())?]);
            }
            let [to_inputs, to_targets] = &mut micro_batches[index];
            engine.write_ids(to_inputs, inputs)?;
            engine.write_ids(to_targets, targets)?;
        }
        Ok(batch.inputs.len())
    }

    /// Launches all work of a step: passes, clipping, update, and the packed weights of the next step. The guard decides whether the update happens, where the
    /// gradients are. The engine may repeat what an earlier step of the same kind launched.
    pub(super) fn launch(&mut self, learning_rate: f64, changes_form: bool, selects_mask: bool) -> Result<Launched> {
        let (shape, update) = (self.micro_batch(), self.progress.updates + 1);
        let (planned_step, step) = self.numbers(learning_rate, update);
        let form: Vec<bool> = self.model.linears().map(|linear| linear.sparse().is_some()).collect();
        let Trainer { engine, model, loss, guard, micro_batches, planned, settings, progress, seat, .. } = self;
        let limits = StepLimits { clip_norm: settings.clip_norm, loss_scale: progress.loss_scale.scale() };
        let kind = (shape, micro_batches.len(), limits, changes_form, selects_mask, form);
        let launched = Launched::Done { changes: 0.0 };
        let mut launch = StepLaunch {
            engine,
            model,
            loss,
            guard,
            micro_batches,
            planned,
            shape,
            limits,
            steps: [planned_step, step],
            refresh: (!changes_form).then_some(selects_mask),
            launched,
            seat: seat.as_mut(),
        };
        if planned_step.second_moment == SecondMoment::Watched || launch.seat.is_some() {
            // The change is read while the step is launched; sums over ranks are begun once.
            launch.run()?;
        } else {
            engine.begin_update(learning_rate, update)?;
            engine.repeat(key_of(&kind, launch.steps), || launch.run())?;
        }
        Ok(launch.launched)
    }

    /// The numbers of the optimizer's step: for the weights of the plan's layers, and for other matrices.
    fn numbers(&self, learning_rate: f64, step: u64) -> (AdamWStep, AdamWStep) {
        let TrainingSettings { beta1, beta2, epsilon, weight_decay, .. } = self.settings;
        let pruned_decay = match self.plan.decay {
            None => PrunedDecay::None,
            Some(Decay { strength, target: DecayTarget::Gradient }) => {
                PrunedDecay::Gradient { strength: strength as f32 }
            }
            Some(Decay { strength, target: DecayTarget::Weight }) => PrunedDecay::Weight { strength },
        };
        let switch = self.progress.switch.as_ref();
        let second_moment = match switch.map(PhaseSwitch::switched_at) {
            Some(None) => SecondMoment::Watched,
            Some(Some(at)) if self.is_sparse() => SecondMoment::Frozen { at },
            _ => SecondMoment::Moving,
        };
        let other = AdamWStep {
            learning_rate,
            beta1,
            beta2,
            epsilon,
            weight_decay,
            step,
            gradient_scale: 1.0,
            second_moment: SecondMoment::Moving,
            pruned_decay: PrunedDecay::None,
        };
        (AdamWStep { second_moment, pruned_decay, ..other }, other)
    }

    /// Reads what the step found: the only time that it waits for the engine.
    pub(super) fn findings(&mut self, launched: &Launched, selects_mask: bool) -> Result<StepFindings> {
        if let Launched::Refused = launched {
            return Ok(StepFindings { loss: f64::NAN, norm: f64::NAN, flips: vec![] });
        }
        let Trainer { engine, model, guard, .. } = self;
        let layers: Vec<_> = match selects_mask {
            true => model.linears().filter_map(Linear::sparse).collect(),
            false => vec![],
        };
        engine.findings(guard, &layers)
    }

    /// STEP's decision to switch, after an update.
    pub(super) fn observe(&mut self, launched: &Launched) {
        let (Some(switch), Launched::Done { changes }) = (&mut self.progress.switch, launched) else { return };
        let planned = self.model.linears().filter(|linear| self.planned.contains(linear.name()));
        let elements = planned.map(|linear| linear.out_features() * linear.in_features()).sum();
        switch.advance();
        switch.observe(*changes, elements, self.settings.epsilon);
    }

    /// The flip rates of the 2:4 layers whose flips were read.
    pub(super) fn flips(&self, of_layers: &[u64]) -> Flips {
        let (mut flips, mut elements, mut layers) = (0, 0, vec![]);
        for (linear, &of_layer) in self.model.linears().filter(|linear| linear.sparse().is_some()).zip(of_layers) {
            let size = (linear.out_features() * linear.in_features()) as u64;
            flips += of_layer;
            elements += size;
            layers.push(of_layer as f64 / size.max(1) as f64);
        }
        Flips { overall: flips as f64 / elements.max(1) as f64, layers }
    }
}

/// The work of a step over the parts of a trainer.
struct StepLaunch<'a, E: Engine> {
    engine: &'a E,
    model: &'a mut Gpt<E>,
    loss: &'a mut E::Buffer,
    guard: &'a mut E::StepGuard,
    micro_batches: &'a [[E::Buffer; 2]],
    planned: &'a HashSet<String>,
    shape: BatchShape,
    limits: StepLimits,
    /// For the weights of the plan's layers, and for other matrices.
    steps: [AdamWStep; 2],
    /// Whether masks are selected; nothing where layers change their form, which packs them.
    refresh: Option<bool>,
    launched: Launched,
    seat: Option<&'a mut Seat<E>>,
}

impl<E: Engine> StepLaunch<'_, E> {
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
        if let Some(selects_mask) = self.refresh {
            let (engine, guard) = (self.engine, &*self.guard);
            self.model.linears_mut().try_for_each(|linear| linear.refresh_guarded(engine, selects_mask, guard))?;
        }
        self.engine.begin_phase(StepPhase::Rest)?;
        self.launched = Launched::Done { changes };
        Ok(())
    }

    /// The passes of all micro-batches.
    fn passes(&mut self) -> Result<()> {
        let StepLaunch { engine, model, loss, micro_batches, shape, limits, seat, .. } = self;
        let ranks = seat.as_ref().map_or(1, |seat| seat.rank().count());
        let tokens = ranks * micro_batches.iter().map(|[inputs, _]| inputs.len()).sum::<usize>();
        let scale = limits.loss_scale / tokens as f32;
        engine.clear(loss)?;
        let mut accumulate = Accumulate::Overwrite;
        let last = micro_batches.len().saturating_sub(1);
        for (index, [inputs, targets]) in micro_batches.iter().enumerate() {
            engine.begin_phase(StepPhase::Forward)?;
            let mut ready = |gradients: Vec<&mut E::Buffer>| match seat {
                Some(Seat { reduction, rank }) if index == last => reduction.ready(rank, gradients),
                _ => Ok(()),
            };
            let tokens = (inputs, targets);
            let outcome = model.gradients_of(engine, tokens, *shape, (scale, accumulate), loss, &mut ready);
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
        self.engine.judge(&gradients, self.loss, self.limits, self.guard)
    }

    /// The optimizer's step, unless the guard skips it. Returns the sum of the changes of watched second moments.
    fn update(&mut self) -> Result<f64> {
        let StepLaunch { engine, model, guard, planned, steps: [planned_step, other], .. } = self;
        let step = |parameter: &Parameter<E>, linear: Option<&str>| {
            let own = if linear.is_some_and(|name| planned.contains(name)) { *planned_step } else { *other };
            AdamWStep { weight_decay: if parameter.shape().len() >= 2 { own.weight_decay } else { 0.0 }, ..own }
        };
        model.update(engine, step, guard)
    }
}

/// The key of a kind of step: of everything that its calls are given, but for the learning rate and the number of the update.
fn key_of(kind: &impl Debug, steps: [AdamWStep; 2]) -> u64 {
    let steps = steps.map(|step| AdamWStep { learning_rate: 0.0, step: 0, ..step });
    let mut hasher = DefaultHasher::new();
    format!("{kind:?} {steps:?}").hash(&mut hasher);
    hasher.finish()
}
