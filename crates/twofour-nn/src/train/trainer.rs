//! The training loop.

use std::{collections::HashMap, sync::Arc, time::Instant};

use twofour::{
    adamw_step::{ChangeMean, PhaseSwitch},
    layer::Accumulate,
};

use super::{
    Corpus, LayerForm, SparseBegin, SparsityPlan, StepReport, forms::Flips, progress::Progress, settings::check,
};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::{AdamWStep, Engine, Kind, OptimizerStep, PrunedDecay, SecondMoment, SgdStep},
    model::{Gpt, GptConfig},
    optim::{LossScale, Schedule, clip_factor},
    parameter::Parameter,
    recipe::{Method, ModelSettings, OptimizerKind, SwitchMean, TrainingSettings},
};

/// Trains a [`Gpt`] on a [`Corpus`] with an [`Engine`].
///
/// ```
/// use std::sync::Arc;
/// use twofour_nn::{engine::cpu::CpuEngine, recipe::*, train::{Corpus, SparsityPlan, Trainer}};
/// let corpus = Arc::new(Corpus::new(b"two of every four ".repeat(100), 0.1)?);
/// let kind = ModelKind::Gpt;
/// let model = ModelSettings { kind, layers: 1, width: 16, heads: 2, context: 16, feed_forward: Some(32) };
/// let training = TrainingSettings { steps: 30, batch: 4, warm_up: 3, ..Default::default() };
/// let layers = vec!["blocks.0.mlp.up".to_owned(), "blocks.0.mlp.down".to_owned()];
/// let plan = SparsityPlan::of_method(Method::Ste, layers, training.steps);
/// let mut trainer = Trainer::new(CpuEngine, &model, &training, plan, corpus)?;
/// let before = trainer.validate(8)?;
/// while !trainer.is_finished() {
///     trainer.step()?;
/// }
/// assert!(trainer.validate(8)? < before);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Trainer<E: Engine> {
    pub(super) engine: E,
    pub(super) model: Gpt<E>,
    pub(super) corpus: Arc<Corpus>,
    pub(super) settings: TrainingSettings,
    pub(super) plan: SparsityPlan,
    pub(super) progress: Progress,
    schedule: Schedule,
    /// Of each planned layer, the part of the plan that it belongs to.
    pub(super) parts: HashMap<String, usize>,
    /// A [`Kind::Wide`] scalar that losses are added to.
    loss: E::Buffer,
}

/// Consecutive skipped steps after which training stops.
const MOST_SKIPPED: u64 = 30;

impl<E: Engine> Trainer<E> {
    /// A trainer of a new model at step 0.
    ///
    /// # Errors
    /// Settings out of range, too little text for the model's context, layers that cannot be 2:4, not enough memory.
    pub fn new(
        engine: E,
        model: &ModelSettings,
        training: &TrainingSettings,
        plan: SparsityPlan,
        corpus: Arc<Corpus>,
    ) -> Result<Self> {
        check(training)?;
        let model = Gpt::new(&engine, &GptConfig::from(model), training.seed)?;
        Self::with_model(engine, model, training, plan, corpus)
    }

    /// A trainer of an existing model, at step 0: for fine-tuning.
    ///
    /// # Errors
    /// Those of [`Trainer::new`].
    pub fn with_model(
        engine: E,
        mut model: Gpt<E>,
        training: &TrainingSettings,
        plan: SparsityPlan,
        corpus: Arc<Corpus>,
    ) -> Result<Self> {
        check(training)?;
        plan.check()?;
        corpus.expect_sequences_of(model.config().context)?;
        let names: Vec<String> = model.linears().map(|linear| linear.name().to_owned()).collect();
        if let Some(pattern) = plan.parts().flat_map(|part| &part.layers).find(|name| !names.contains(name)) {
            return Err(Error::NoSuchLayer { pattern: pattern.clone(), layers: names });
        }
        if plan.parts().any(|part| part.method == Method::Activation) {
            model.use_squared_relu();
        }
        model.begin_training(&engine)?;
        if training.optimizer == OptimizerKind::Sgd {
            if matches!(plan.begin, SparseBegin::Settled { .. }) {
                let (first, second) = ("the method `step`".to_owned(), "the optimizer `sgd`".to_owned());
                let reason = "STEP switches by second moments, which gradient descent does not have";
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
        let loss = engine.zeros(Kind::Wide, 1)?;
        let of_part = |(index, part): (usize, &SparsityPlan)| {
            part.layers.iter().map(move |l| (l.clone(), index)).collect::<Vec<_>>()
        };
        let parts = plan.parts().enumerate().flat_map(of_part).collect();
        let (settings, schedule) = (training.clone(), Schedule::new(training)?);
        let mut trainer = Trainer { engine, model, corpus, settings, plan, progress, schedule, parts, loss };
        trainer.change_form()?;
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
    pub fn model(&self) -> &Gpt<E> {
        &self.model
    }

    /// Engine and model, for running the model.
    pub fn engine_and_model(&mut self) -> (&E, &mut Gpt<E>) {
        (&self.engine, &mut self.model)
    }

    /// The text that it is trained on.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// The settings of the loop.
    pub fn settings(&self) -> &TrainingSettings {
        &self.settings
    }

    /// The plan of sparsity.
    pub fn plan(&self) -> &SparsityPlan {
        &self.plan
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

    /// Whether the plan's layers are 2:4 in the next step.
    pub fn is_sparse(&self) -> bool {
        let is_sparse = |form| matches!(form, LayerForm::TwoOfFour | LayerForm::TwoOfFourInput);
        self.model.linears().any(|linear| is_sparse(linear.form()))
    }

    /// One step: forward and backward passes, clipping, update, new masks. Where the loss or a gradient is not finite, nothing is updated and the report
    /// says so.
    ///
    /// # Errors
    /// [`Error::Diverged`] after 30 such steps in a row; those of the engine.
    pub fn step(&mut self) -> Result<StepReport> {
        E::scope(|| self.step_in_scope())
    }

    fn step_in_scope(&mut self) -> Result<StepReport> {
        let begin = Instant::now();
        let step = self.progress.step;
        let (learning_rate, is_sparse) = (self.schedule.at(step), self.is_sparse());
        let outcome = self.passes(step)?;
        let tokens = self.settings.batch * self.model.config().context;
        let skipped = !(outcome.loss.is_finite() && outcome.norm.is_finite());
        self.progress.loss_scale.observe(!skipped);
        self.progress.step += 1;
        let mut flips = Flips::default();
        if skipped {
            self.progress.skipped += 1;
            self.progress.skipped_in_a_row += 1;
            if self.progress.skipped_in_a_row >= MOST_SKIPPED {
                return Err(Error::Diverged { step, count: MOST_SKIPPED });
            }
            self.change_form()?;
        } else {
            self.progress.skipped_in_a_row = 0;
            self.update(learning_rate, &outcome)?;
            flips = self.refresh()?;
        }
        Ok(StepReport {
            step,
            loss: outcome.loss,
            learning_rate,
            gradient_norm: outcome.norm,
            flip_rate: flips.overall,
            layer_flip_rates: flips.layers,
            observed_flip_rate: flips.observed,
            is_sparse,
            skipped,
            skipped_so_far: self.progress.skipped,
            tokens,
            seconds: begin.elapsed().as_secs_f64(),
        })
    }

    /// The passes of all micro-batches of a step.
    fn passes(&mut self, step: u64) -> Result<Outcome> {
        let Trainer { engine, model, corpus, settings, loss, .. } = self;
        let context = model.config().context;
        let batch = corpus.batch(settings.seed, step, settings.batch, context);
        let micro_batch = settings.micro_batch.unwrap_or(settings.batch);
        let loss_scale = self.progress.loss_scale.scale();
        let scale = loss_scale / batch.inputs.len() as f32;
        let shape = BatchShape { batch: micro_batch, positions: context };
        engine.clear(loss)?;
        let micro_batches = batch.inputs.chunks(shape.tokens()).zip(batch.targets.chunks(shape.tokens()));
        let mut accumulate = Accumulate::Overwrite;
        for tokens in micro_batches {
            match model.gradients(engine, tokens, shape, (scale, accumulate), loss) {
                Err(error) if is_not_finite(&error) => {
                    return Ok(Outcome { loss: f64::NAN, norm: f64::NAN, loss_scale });
                }
                outcome => outcome?,
            }
            accumulate = Accumulate::Add;
        }
        // Matrices first, then vectors: the order that sums are taken in.
        let parameters = model.parameters();
        let (matrices, vectors): (Vec<&Parameter<E>>, Vec<_>) = parameters.iter().partition(|p| p.shape().len() >= 2);
        let gradients: Vec<&E::Buffer> = matrices.iter().chain(&vectors).filter_map(|p| p.gradient()).collect();
        let norm = engine.gradient_norm(&gradients)? / f64::from(loss_scale);
        let sum = f64::from(engine.read(loss)?.first().copied().unwrap_or(f32::NAN));
        Ok(Outcome { loss: sum / batch.inputs.len() as f64, norm, loss_scale })
    }

    /// The optimizer's step, and STEP's decision to switch.
    fn update(&mut self, learning_rate: f64, outcome: &Outcome) -> Result<()> {
        let updates = self.progress.updates + 1;
        let TrainingSettings { optimizer, momentum, beta1, beta2, epsilon, weight_decay, clip_norm, .. } =
            self.settings;
        let factor = clip_factor(outcome.norm, clip_norm) / f64::from(outcome.loss_scale);
        let is_sparse = self.is_sparse();
        let switch = self.progress.switch.as_ref();
        let second_moment = match switch.map(PhaseSwitch::switched_at) {
            Some(None) => match self.plan.switch_mean {
                SwitchMean::Arithmetic => SecondMoment::Watched,
                SwitchMean::Geometric => SecondMoment::WatchedByLogarithm,
            },
            Some(Some(at)) if is_sparse => SecondMoment::Frozen { at },
            _ => SecondMoment::Moving,
        };
        let (parts, plan) = (&self.parts, &self.plan);
        let step = |parameter: &Parameter<E>, linear: Option<&str>| {
            let part = linear.and_then(|name| parts.get(name));
            let decay = part.and_then(|&part| plan.parts().nth(part)?.decay);
            let weight_decay = if parameter.shape().len() >= 2 { weight_decay } else { 0.0 };
            let pruned_decay = decay.map_or(PrunedDecay::None, PrunedDecay::from);
            let gradient_scale = factor as f32;
            if optimizer == OptimizerKind::Sgd {
                return OptimizerStep::Sgd(SgdStep {
                    learning_rate,
                    momentum,
                    weight_decay,
                    gradient_scale,
                    pruned_decay,
                });
            }
            OptimizerStep::AdamW(AdamWStep {
                learning_rate,
                beta1,
                beta2,
                epsilon,
                weight_decay,
                step: updates,
                gradient_scale,
                // STEP is the method of the plan itself, not of its overrides.
                second_moment: if part == Some(&0) { second_moment } else { SecondMoment::Moving },
                pruned_decay,
            })
        };
        let changes = self.model.update(&self.engine, step)?;
        self.progress.updates = updates;
        if let Some(switch) = &mut self.progress.switch {
            let planned = self.model.linears().filter(|linear| self.parts.get(linear.name()) == Some(&0));
            let elements = planned.map(|linear| linear.out_features() * linear.in_features()).sum();
            switch.advance();
            switch.observe(changes, elements, epsilon);
        }
        Ok(())
    }

    /// The mean loss, in nats a token, over at most `limit` sequences that cover the validation part evenly: the same ones at every call. It is computed
    /// with the weights of the next step, and changes nothing.
    ///
    /// # Errors
    /// Those of the forward pass.
    pub fn validate(&mut self, limit: usize) -> Result<f64> {
        E::scope(|| self.validate_in_scope(limit))
    }

    fn validate_in_scope(&mut self, limit: usize) -> Result<f64> {
        let Trainer { engine, model, corpus, settings, loss, .. } = self;
        let context = model.config().context;
        let sequences = settings.micro_batch.unwrap_or(settings.batch);
        let (mut total, mut tokens) = (0f64, 0usize);
        for batch in corpus.validation_batches(sequences, limit, context) {
            let shape = BatchShape { batch: batch.inputs.len() / context, positions: context };
            engine.clear(loss)?;
            model.loss(engine, (&batch.inputs, &batch.targets), shape, loss)?;
            total += engine.read(loss)?.iter().map(|&sum| f64::from(sum)).sum::<f64>();
            tokens += batch.inputs.len();
        }
        Ok(total / tokens as f64)
    }
}

/// What the passes of a step found.
struct Outcome {
    loss: f64,
    norm: f64,
    /// The factor that the gradients still carry.
    loss_scale: f32,
}

/// Whether an estimate of a gradient was refused because the gradient is not finite.
fn is_not_finite(error: &Error) -> bool {
    match error {
        Error::Core(twofour::Error::NotANumber { .. } | twofour::Error::Infinite { .. }) => true,
        Error::InLayer { source, .. } => is_not_finite(source),
        _ => false,
    }
}
