//! What is trained, and for how long.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use twofour_nn::{
    model::{Gpt, GptConfig, TransformerConfig},
    recipe::{DeviceKind, Method, SparsitySettings, TrainingSettings},
    train::{Corpus, SparsityPlan, Trainer},
};
use twofour_transformer::engine::Engine;

use crate::interrupt;

/// All settings of a run, written before the first step so that an interrupted run resumes with the same settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// The requested duration in minutes.
    pub(crate) minutes: f64,
    /// Seed of initial weights and batches, the same for both models.
    pub(crate) seed: u64,
    /// The model's sizes.
    pub(crate) model: GptConfig,
    /// How it is trained.
    pub(crate) training: TrainingSettings,
    /// Globs of the layers that are 2:4 in the sparse model.
    pub(crate) sparse_layers: Vec<String>,
}

/// Planned end of training, as a share of the duration; the rest is for the last checkpoint, validation and measuring.
const TRAINED_SHARE: f64 = 0.76;

/// Latest end of training, as a share of the duration: the machine may become busier after the steps were timed.
const LATEST_SHARE: f64 = 0.84;

/// Least time for checkpoint, files and packing, whatever the duration.
const FIXED: Duration = Duration::from_secs(5);

/// Steps of each model that are timed to plan with.
const TIMED_STEPS: u64 = 2;

/// Fewest steps, which run even where they exceed the duration: with fewer, the loss stays near that of uniform
/// guesses.
pub(super) const MIN_STEPS: u64 = 16;

/// Most passes over the training text: a model that sees it more often learns it by heart. Only a GPU gets there.
const MAX_EPOCHS: u64 = 10;

/// The learning rate after the warm-up. At 1.5e-3 the same loss takes twice as many steps.
const LEARNING_RATE: f64 = 7e-4;

/// Steps of the warm-up, in a run that is not too short for them.
const WARM_UP: u64 = 70;

impl Plan {
    /// Plans a run of about `minutes`, or shorter where [`MAX_EPOCHS`] are done before, by timing a few steps of each
    /// model on this machine, with engines that `open` returns.
    pub(crate) fn new<E: Engine>(
        minutes: f64,
        seed: u64,
        corpus: &Arc<Corpus>,
        device: DeviceKind,
        open: &impl Fn() -> Result<E>,
    ) -> Result<Plan> {
        let mut plan = Plan {
            minutes,
            seed,
            model: GptConfig::quickstart(),
            training: TrainingSettings {
                batch: match device {
                    // At equal time, many steps of one short sequence reach a lower loss than fewer steps of a longer
                    // one.
                    DeviceKind::Cpu => 1,
                    // A step of one takes a GPU as long.
                    DeviceKind::Cuda => 16,
                },
                seed,
                steps: MIN_STEPS,
                warm_up: 2,
                learning_rate: LEARNING_RATE,
                final_learning_rate: LEARNING_RATE / 10.0,
                ..TrainingSettings::default()
            },
            sparse_layers: vec!["blocks.*".to_owned()],
        };
        let begun = Instant::now();
        let mut pair = Duration::ZERO;
        for mut trainer in [plan.dense(open()?, corpus)?, plan.sparse(open()?, corpus)?] {
            trainer.step()?;
            let begun = Instant::now();
            for _ in 0..TIMED_STEPS {
                interrupt::check()?;
                trainer.step()?;
            }
            pair += begun.elapsed() / TIMED_STEPS as u32;
        }
        // The trainers that the run begins with take as long to make as these did.
        let spent = 2 * begun.elapsed() - (TIMED_STEPS as u32 + 1) * pair;
        let left = (minutes * 60.0 * TRAINED_SHARE).min(minutes * 60.0 - FIXED.as_secs_f64()) - spent.as_secs_f64();
        let bytes_each = (plan.training.batch * plan.model.context) as u64;
        let most = (MAX_EPOCHS * corpus.training().len() as u64 / bytes_each).max(MIN_STEPS);
        plan.training.steps = ((left / pair.as_secs_f64()) as u64).clamp(MIN_STEPS, most);
        plan.training.warm_up = (plan.training.steps / 10).clamp(2, WARM_UP);
        tracing::info!(?pair, steps = plan.training.steps, "planned");
        Ok(plan)
    }

    /// The requested duration in minutes.
    pub(crate) fn length(&self) -> Duration {
        Duration::from_secs_f64(self.minutes * 60.0)
    }

    /// Whether training must end, `spent` after the start of the run.
    pub(crate) fn is_late(&self, spent: Duration) -> bool {
        spent > self.length().mul_f64(LATEST_SHARE)
    }

    /// The dense model at its first step.
    pub(crate) fn dense<E: Engine>(&self, engine: E, corpus: &Arc<Corpus>) -> Result<Trainer<E>> {
        self.trainer(engine, SparsityPlan::dense(), corpus)
    }

    /// The 2:4 model at its first step: the same initial weights, the same batches.
    pub(crate) fn sparse<E: Engine>(&self, engine: E, corpus: &Arc<Corpus>) -> Result<Trainer<E>> {
        let settings = SparsitySettings {
            method: Method::STE,
            layers: Some(self.sparse_layers.clone()),
            ..SparsitySettings::default()
        };
        let names: Vec<String> =
            TransformerConfig::from(&self.model).linear_layers().into_iter().map(|(name, ..)| name).collect();
        self.trainer(engine, SparsityPlan::new(&settings, self.training.steps, &names)?, corpus)
    }

    fn trainer<E: Engine>(&self, engine: E, sparsity: SparsityPlan, corpus: &Arc<Corpus>) -> Result<Trainer<E>> {
        let model = Gpt::new(&engine, &self.model, self.seed)?;
        Ok(Trainer::with_model(engine, model, &self.training, sparsity, corpus.clone())?)
    }
}
