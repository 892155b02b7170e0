//! What is trained, and for how long.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Result;
use candle_core::Device;
use serde::{Deserialize, Serialize};
use twofour_candle::{
    gpt::{Config, Gpt},
    linear::{SparsifyConfig, sparsify},
    train::{Corpus, TrainConfig, Trainer},
};

/// Everything that decides a run; written before the first step, so that an interrupted run goes on as it began.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// The time that was asked for.
    pub(crate) minutes: f64,
    /// Decides initial weights and batches, of both models alike.
    pub(crate) seed: u64,
    /// The model's sizes.
    pub(crate) model: Config,
    /// How it is trained.
    pub(crate) training: TrainConfig,
    /// Globs of the layers that are 2:4 in the sparse model.
    pub(crate) sparse_layers: Vec<String>,
}

/// The share of the time that steps are planned for; the rest is for checkpoints, validation and measuring.
const STEPS_SHARE: f64 = 0.8;

/// Steps of each model that are timed to plan with.
const TIMED_STEPS: u64 = 2;

/// A schedule of fewer steps than this trains nothing.
const LEAST_STEPS: u64 = 8;

impl Plan {
    /// Plans a run of about so many minutes, by timing a few steps of each model on this machine.
    pub(crate) fn new(minutes: f64, seed: u64, corpus: &Arc<Corpus>) -> Result<Plan> {
        let mut plan = Plan {
            minutes,
            seed,
            model: Config::quickstart(),
            training: TrainConfig { batch: 2, seed, steps: LEAST_STEPS, warm_up: 2, ..TrainConfig::default() },
            sparse_layers: vec!["blocks.*".to_owned()],
        };
        let begun = Instant::now();
        let mut pair = Duration::ZERO;
        for mut trainer in [plan.dense(corpus)?, plan.sparse(corpus)?] {
            trainer.step()?;
            let begun = Instant::now();
            for _ in 0..TIMED_STEPS {
                trainer.step()?;
            }
            pair += begun.elapsed() / TIMED_STEPS as u32;
        }
        let left = (minutes * 60.0 - begun.elapsed().as_secs_f64()).max(0.0);
        let steps = (left * STEPS_SHARE / pair.as_secs_f64()) as u64;
        plan.training.steps = steps.max(LEAST_STEPS);
        plan.training.warm_up = (plan.training.steps / 10).max(2);
        tracing::info!(?pair, steps = plan.training.steps, "planned");
        Ok(plan)
    }

    /// The dense model at its first step.
    pub(crate) fn dense(&self, corpus: &Arc<Corpus>) -> Result<Trainer> {
        let model = Gpt::new(&self.model, self.seed, &Device::Cpu)?;
        Ok(Trainer::new(model, corpus.clone(), self.training)?)
    }

    /// The 2:4 model at its first step: the same initial weights, the same batches.
    pub(crate) fn sparse(&self, corpus: &Arc<Corpus>) -> Result<Trainer> {
        let mut model = Gpt::new(&self.model, self.seed, &Device::Cpu)?;
        sparsify(&mut model, &SparsifyConfig { include: self.sparse_layers.clone(), ..SparsifyConfig::default() })?;
        Ok(Trainer::new(model, corpus.clone(), self.training)?)
    }
}
