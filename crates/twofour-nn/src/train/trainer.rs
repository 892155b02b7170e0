//! The training loop.

use std::{collections::HashMap, sync::Arc, time::Instant};

use twofour::adamw_step::{ChangeMean, PhaseSwitch};

use super::{
    ConfigOf, Corpus, Evaluation, LossScale, OptimizerKind, Schedule, SparseBegin, SparsityPlan, StepReport,
    TrainingData, TrainingSettings,
    forms::Refresh,
    masks::{MethodMasks, masks_of},
    methods::{HostMasks, SwitchMean},
    progress::Progress,
    ranks::Seat,
    settings::check,
    teacher::Teacher,
};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::{Engine, Kind},
    linear::LayerForm,
    model::{ModelParts as _, TrainedModel},
    parameter::Parameter,
};

/// Trains a model with an [`Engine`]: on a [`Corpus`] a [`Gpt`](crate::model::Gpt), on other data the model that learns
/// from them.
///
/// ```
/// use std::sync::Arc;
/// use twofour_nn::{recipe::*, train::{Corpus, SparsityPlan, Trainer}};
/// use twofour_transformer::engine::cpu::CpuEngine;
/// let corpus = Arc::new(Corpus::new(b"two of every four ".repeat(100), 0.1)?);
/// let kind = ModelKind::Gpt;
/// let model = ModelSettings {
///     kind,
///     layers: 1,
///     width: 16,
///     heads: 2,
///     context: 16,
///     feed_forward: Some(32),
///     ..Default::default()
/// };
/// let training = TrainingSettings { steps: 30, batch: 4, warm_up: 3, ..Default::default() };
/// let layers = vec!["blocks.0.mlp.up".to_owned(), "blocks.0.mlp.down".to_owned()];
/// let plan = SparsityPlan::of_method(Method::STE, layers, training.steps);
/// let mut trainer = Trainer::new(CpuEngine, &model, &training, plan, corpus)?;
/// let before = trainer.validate(8)?;
/// while !trainer.is_finished() {
///     trainer.step()?;
/// }
/// assert!(trainer.validate(8)? < before);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Trainer<E: Engine, D: TrainingData = Corpus> {
    /// Its place among other ranks. First, so that sums of gradients end before their memory is freed.
    pub(super) seat: Option<Seat<E>>,
    pub(super) engine: E,
    pub(super) model: D::Model<E>,
    pub(super) teacher: Option<Teacher<D::Model<E>>>,
    pub(super) data: Arc<D>,
    pub(super) settings: TrainingSettings,
    pub(super) plan: SparsityPlan,
    pub(super) progress: Progress,
    /// The masks that methods choose themselves.
    pub(super) masks: Vec<MethodMasks>,
    schedule: Schedule,
    /// The part of the plan that each planned layer belongs to, by the layer's name.
    pub(super) parts: HashMap<String, usize>,
    /// A [`Kind::Wide`] scalar that losses are added to.
    pub(super) loss: E::Buffer,
    pub(super) guard: E::StepGuard,
    /// Inputs and targets of each micro-batch of the step.
    pub(super) micro_batches: Vec<Option<<D::Model<E> as TrainedModel<E>>::Uploaded>>,
}

/// The tables of a decoder's tokens, where each has its own.
const TABLES: [&str; 2] = ["embedding", "head"];

/// Consecutive skipped steps after which training stops.
const MAX_SKIPPED: u64 = 30;

impl<E: Engine, D: TrainingData> Trainer<E, D> {
    /// A trainer of a new model at step 0.
    ///
    /// # Errors
    /// Settings out of range, data that do not fit the model, layers that cannot be 2:4, not enough memory.
    pub fn new(
        engine: E,
        model: impl Into<ConfigOf<D, E>>,
        training: &TrainingSettings,
        plan: SparsityPlan,
        data: Arc<D>,
    ) -> Result<Self> {
        check(training)?;
        let model = D::Model::from_config(&engine, &model.into(), training.seed)?;
        Self::with_model(engine, model, training, plan, data)
    }

    /// A trainer of an existing model, at step 0: for fine-tuning.
    ///
    /// # Errors
    /// Those of [`Trainer::new`].
    pub fn with_model(
        engine: E,
        mut model: D::Model<E>,
        training: &TrainingSettings,
        plan: SparsityPlan,
        data: Arc<D>,
    ) -> Result<Self> {
        check(training)?;
        plan.check()?;
        data.prepare(&engine, &mut model)?;
        let names: Vec<String> = model.linears().map(|linear| linear.name().to_owned()).collect();
        if let Some(pattern) = plan.parts().flat_map(|part| &part.layers).find(|name| !names.contains(name)) {
            return Err(Error::NoSuchLayer { pattern: pattern.clone(), layers: names });
        }
        for part in plan.parts().filter(|part| !part.is_dense()) {
            model.prepare(&part.layers, part.method.sparse_form())?;
        }
        let freezes = |layer: &str| plan.part_of(layer).is_some_and(|part| part.method.freezes_model());
        let is_table =
            |name: &str| training.frozen_embeddings && TABLES.iter().any(|table| name == format!("{table}.weight"));
        if let Some(table) = plan
            .parts()
            .filter(|part| !part.is_dense())
            .find_map(|part| part.layers.iter().find(|layer| is_table(&format!("{layer}.weight"))))
        {
            let (first, second) = ("`training.frozen_embeddings`".to_owned(), format!("a mask of the layer `{table}`"));
            return Err(Error::Conflict { first, second, reason: "a mask changes the weight" });
        }
        let freezes_model = plan.parts().any(|part| part.method.freezes_model());
        for parameter in model.parameters_mut() {
            let layer = parameter.name().strip_suffix(".weight").unwrap_or_default();
            match freezes_model {
                true if freezes(layer) => parameter.begin_gradient(&engine)?,
                true if plan.part_of(layer).is_none() => {}
                _ if is_table(parameter.name()) => {}
                _ => parameter.begin_training(&engine)?,
            }
        }
        if training.optimizer == OptimizerKind::Sgd {
            let required = plan.parts().find_map(|part| Some((part.method.name(), part.method.requires_adamw()?)));
            if let Some((method, reason)) = required {
                let (first, second) = (format!("the method `{method}`"), "the optimizer `sgd`".to_owned());
                return Err(Error::Conflict { first, second, reason });
            }
            model.parameters_mut().into_iter().for_each(Parameter::drop_second_moment);
        }
        let switch = match plan.begin {
            SparseBegin::Settled { earliest, latest } => {
                let window = (1.0 / (1.0 - training.beta2)).round() as usize;
                let mean = match plan.switch_mean {
                    SwitchMean::Arithmetic => ChangeMean::Arithmetic,
                    SwitchMean::Geometric => ChangeMean::Geometric,
                };
                Some(PhaseSwitch::new(mean, window, Some([earliest, latest]))?)
            }
            SparseBegin::Step(_) => None,
        };
        let progress = Progress {
            step: 0,
            updates: 0,
            skipped: 0,
            skipped_in_a_row: 0,
            loss_scale: LossScale::for_type(engine.compute_type()),
            switch,
        };
        // Each layer may have a mask that it computes with, and one that is observed.
        let (loss, guard) = (engine.zeros(Kind::Wide, 1)?, engine.step_guard(2 * names.len())?);
        let of_part = |(index, part): (usize, &SparsityPlan)| {
            part.layers.iter().map(move |l| (l.clone(), index)).collect::<Vec<_>>()
        };
        let parts = plan.parts().enumerate().flat_map(of_part).collect();
        let masks = masks_of(&plan, &model, training.seed)?;
        let (settings, schedule) = (training.clone(), Schedule::new(training)?);
        let micro_batches = vec![];
        let seat = None;
        let mut trainer = Trainer {
            seat,
            engine,
            model,
            teacher: None,
            data,
            settings,
            plan,
            progress,
            masks,
            schedule,
            parts,
            loss,
            guard,
            micro_batches,
        };
        trainer.change_form(1.0)?;
        Ok(trainer)
    }

    /// The engine.
    pub fn engine(&self) -> &E {
        &self.engine
    }

    /// The engine, for another trainer.
    pub fn into_engine(self) -> E {
        self.engine
    }

    /// The model as it is now.
    pub fn model(&self) -> &D::Model<E> {
        &self.model
    }

    /// Engine and model, for running the model.
    pub fn engine_and_model(&mut self) -> (&E, &mut D::Model<E>) {
        (&self.engine, &mut self.model)
    }

    /// What a person should know about how the engine works, such as why it captures no steps: each message once.
    pub fn take_note(&self) -> Option<String> {
        self.engine.take_note()
    }

    /// What it is trained on.
    pub fn data(&self) -> &Arc<D> {
        &self.data
    }

    /// The settings of the loop.
    pub fn settings(&self) -> &TrainingSettings {
        &self.settings
    }

    /// The plan of sparsity.
    pub fn plan(&self) -> &SparsityPlan {
        &self.plan
    }

    /// The masks that methods choose themselves, on the host.
    pub fn host_masks(&self) -> impl Iterator<Item = &(dyn HostMasks + 'static)> {
        self.masks.iter().map(|own| &*own.masks)
    }

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.progress.step
    }

    /// Steps whose update was skipped because the loss or a gradient was not finite.
    pub fn skipped_steps(&self) -> u64 {
        self.progress.skipped
    }

    /// Whether all steps of the run are done. [`Trainer::step`] goes on at the final learning rate.
    pub fn is_finished(&self) -> bool {
        self.progress.step >= self.settings.steps
    }

    /// The step after which the second moments had settled, so that STEP's layers became 2:4; none before, and of other
    /// methods.
    pub fn settled_at(&self) -> Option<u64> {
        self.progress.switch.as_ref().and_then(PhaseSwitch::switched_at)
    }

    /// Whether the plan's layers are 2:4 in the next step.
    pub fn is_sparse(&self) -> bool {
        let is_sparse = |form| matches!(form, LayerForm::TwoOfFour | LayerForm::TwoOfFourInput);
        self.model.linears().any(|linear| is_sparse(linear.form()))
    }

    /// One step: forward and backward passes, clipping, update, new masks. Where the loss or a gradient is not finite,
    /// nothing is updated and the report says so.
    ///
    /// # Errors
    /// [`Error::Diverged`] after 30 such steps in a row; those of the engine. Among other ranks: [`Error::Rank`] where
    /// another has failed, and [`Error::RanksDiffer`].
    pub fn step(&mut self) -> Result<StepReport> {
        self.begin_with_others()?;
        self.step_with_others()
    }

    /// A step that all ranks have begun.
    pub(super) fn step_with_others(&mut self) -> Result<StepReport> {
        let outcome = match self.seat.as_ref().and_then(|seat| seat.reduction.threads()) {
            Some(threads) => threads.install(|| E::scope(|| self.step_in_scope())),
            None => E::scope(|| self.step_in_scope()),
        };
        self.told(outcome)
    }

    /// What is added to seeds on this rank.
    pub(super) fn seed_offset(&self) -> u64 {
        self.seat.as_ref().map_or(0, Seat::seed_offset)
    }

    fn step_in_scope(&mut self) -> Result<StepReport> {
        let begin = Instant::now();
        let step = self.progress.step;
        let (learning_rate, is_sparse) = (self.schedule.at(step), self.is_sparse());
        let refreshes = self.refreshes();
        let targets = self.upload(step)?;
        let launched = self.launch(learning_rate, &refreshes, targets)?;
        let found = self.findings(&launched, &refreshes)?;
        // Sums that were aborted are worth nothing.
        self.seat.as_ref().map_or(Ok(()), |seat| seat.rank.check())?;
        let skipped = !found.is_finite();
        let loss_scale = self.progress.loss_scale.scale();
        self.progress.loss_scale.observe(!skipped);
        self.progress.step += 1;
        if skipped {
            self.progress.skipped += 1;
            self.progress.skipped_in_a_row += 1;
            if self.progress.skipped_in_a_row >= MAX_SKIPPED {
                return Err(Error::Diverged { step, count: MAX_SKIPPED });
            }
        } else {
            self.progress.skipped_in_a_row = 0;
            self.progress.updates += 1;
            self.observe(&launched);
        }
        let changed = self.change_form(loss_scale)?;
        // Levels rise by steps, skipped ones among them.
        let optimizer = if skipped { None } else { self.optimizer_numbers(learning_rate, found.norm) };
        let chosen = self.choose_masks(&changed, loss_scale, optimizer.as_ref())?;
        let flips = if skipped {
            self.flips(&[], &vec![Refresh::Packs; refreshes.len()], (&changed, &chosen))
        } else {
            self.flips(&found.flips, &refreshes, (&changed, &chosen))
        };
        self.compare_if_due(!changed.is_empty())?;
        Ok(StepReport {
            step,
            loss: found.loss / targets as f64,
            learning_rate,
            gradient_norm: found.norm,
            flip_rate: flips.overall,
            layer_flip_rates: flips.layers,
            observed_flip_rate: flips.observed,
            is_sparse,
            skipped,
            skipped_so_far: self.progress.skipped,
            targets,
            seconds: begin.elapsed().as_secs_f64(),
        })
    }

    /// The mean loss, in nats a target, over at most `limit` samples that cover the validation part evenly: the same
    /// ones at every call. It is computed with the weights of the next step, and changes nothing.
    ///
    /// # Errors
    /// Those of the forward pass.
    pub fn validate(&mut self, limit: usize) -> Result<f64> {
        Ok(self.evaluate(limit)?.loss)
    }

    /// [`Trainer::validate`], with the accuracy of a classifier.
    ///
    /// # Errors
    /// Those of the forward pass.
    pub fn evaluate(&mut self, limit: usize) -> Result<Evaluation> {
        E::scope(|| self.evaluate_in_scope(limit))
    }

    fn evaluate_in_scope(&mut self, limit: usize) -> Result<Evaluation> {
        let Trainer { engine, model, data, settings, loss, .. } = self;
        let positions = model.positions();
        let shape = BatchShape { batch: settings.micro_batch.unwrap_or(settings.batch), positions };
        let (mut total, mut targets, mut correct) = (0f64, 0usize, None);
        for batch in data.validation_batches(shape, limit) {
            let shape = BatchShape { batch: batch.samples, positions };
            engine.clear(loss)?;
            if let Some(found) = model.evaluate(engine, (&batch.inputs, &batch.targets), shape, loss)? {
                correct = Some(correct.unwrap_or(0) + found);
            }
            total += engine.read(loss)?.iter().map(|&sum| f64::from(sum)).sum::<f64>();
            targets += batch.targets.len();
        }
        let share = |correct: usize| correct as f64 / targets as f64;
        Ok(Evaluation { loss: total / targets as f64, accuracy: correct.map(share) })
    }
}
