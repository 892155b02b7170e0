//! A training step: what is launched, and what is read afterwards.

use twofour::{adamw_step::PhaseSwitch, layer::Accumulate};

use super::{Decay, Trainer, ranks::Seat};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::{AdamWStep, Buffer as _, Engine, Kind, PrunedDecay, SecondMoment, StepFindings, StepLimits, StepPhase},
    linear::Linear,
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
    /// gradients are.
    pub(super) fn launch(&mut self, learning_rate: f64, changes_form: bool, selects_mask: bool) -> Result<Launched> {
        match self.passes() {
            Err(error) if is_not_finite(&error) => return Ok(Launched::Refused),
            passed => passed?,
        }
        self.engine.begin_phase(StepPhase::Update)?;
        self.judge()?;
        let changes = self.update(learning_rate)?;
        self.engine.begin_phase(StepPhase::Masks)?;
        // A layer that changes its form is packed when it does.
        if !changes_form {
            let Trainer { engine, model, guard, .. } = self;
            model.linears_mut().try_for_each(|linear| linear.refresh_guarded(engine, selects_mask, guard))?;
        }
        self.engine.begin_phase(StepPhase::Rest)?;
        Ok(Launched::Done { changes })
    }

    /// The passes of all micro-batches of a step.
    fn passes(&mut self) -> Result<()> {
        let shape = self.micro_batch();
        let ranks = self.ranks();
        let Trainer { engine, model, loss, micro_batches, progress, seat, .. } = self;
        let loss_scale = progress.loss_scale.scale();
        let tokens = ranks * micro_batches.iter().map(|[inputs, _]| inputs.len()).sum::<usize>();
        let scale = loss_scale / tokens as f32;
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
            let outcome = model.gradients_of(engine, tokens, shape, (scale, accumulate), loss, &mut ready);
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
        let Trainer { engine, model, settings, loss, guard, progress, .. } = self;
        let loss_scale = progress.loss_scale.scale();
        // Matrices first, then vectors: the order that sums are taken in.
        let parameters = model.parameters();
        let (matrices, vectors): (Vec<&Parameter<E>>, Vec<_>) = parameters.iter().partition(|p| p.shape().len() >= 2);
        let gradients: Vec<&E::Buffer> = matrices.iter().chain(&vectors).filter_map(|p| p.gradient()).collect();
        engine.judge(&gradients, loss, StepLimits { clip_norm: settings.clip_norm, loss_scale }, guard)
    }

    /// The optimizer's step, unless the guard skips it. Returns the sum of the changes of watched second moments.
    fn update(&mut self, learning_rate: f64) -> Result<f64> {
        let updates = self.progress.updates + 1;
        let TrainingSettings { beta1, beta2, epsilon, weight_decay, .. } = self.settings;
        let decay = match self.plan.decay {
            None => PrunedDecay::None,
            Some(Decay { strength, target: DecayTarget::Gradient }) => {
                PrunedDecay::Gradient { strength: strength as f32 }
            }
            Some(Decay { strength, target: DecayTarget::Weight }) => PrunedDecay::Weight { strength },
        };
        let is_sparse = self.is_sparse();
        let switch = self.progress.switch.as_ref();
        let second_moment = match switch.map(PhaseSwitch::switched_at) {
            Some(None) => SecondMoment::Watched,
            Some(Some(at)) if is_sparse => SecondMoment::Frozen { at },
            _ => SecondMoment::Moving,
        };
        let planned = &self.planned;
        let step = |parameter: &Parameter<E>, linear: Option<&str>| {
            let is_planned = linear.is_some_and(|name| planned.contains(name));
            AdamWStep {
                learning_rate,
                beta1,
                beta2,
                epsilon,
                weight_decay: if parameter.shape().len() >= 2 { weight_decay } else { 0.0 },
                step: updates,
                gradient_scale: 1.0,
                second_moment: if is_planned { second_moment } else { SecondMoment::Moving },
                pruned_decay: if is_planned { decay } else { PrunedDecay::None },
            }
        };
        self.model.update(&self.engine, step, &self.guard)
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
