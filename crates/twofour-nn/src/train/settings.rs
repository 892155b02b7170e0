//! The settings of the loop and of the optimizer.

use serde::{Deserialize, Serialize};

use super::schedule::Schedule;
use crate::{
    Error, Result,
    settings::{LARGEST_SEED, MAX_STEPS, MOMENT, NOT_NEGATIVE, Named, POSITIVE, is_default, name_of, settings},
};

/// The data type of activations and of GEMMs. Master weights, moments and gradients of parameters are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// f32 on a CPU, bf16 on a GPU.
    #[default]
    Automatic,
    /// 32-bit.
    F32,
    /// bfloat16.
    Bf16,
    /// 16-bit, with dynamic loss scaling.
    F16,
}

impl Precision {
    /// The name in a recipe.
    pub fn name(self) -> &'static str {
        name_of(self)
    }
}

impl Named for Precision {
    const ALL: &'static [(&'static str, Self)] = &[
        ("automatic", Precision::Automatic),
        ("f32", Precision::F32),
        ("bf16", Precision::Bf16),
        ("f16", Precision::F16),
    ];
}

/// The optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerKind {
    /// AdamW.
    #[default]
    Adamw,
    /// Stochastic gradient descent with momentum.
    Sgd,
}

impl Named for OptimizerKind {
    const ALL: &'static [(&'static str, Self)] = &[("adamw", OptimizerKind::Adamw), ("sgd", OptimizerKind::Sgd)];
}

/// How the learning rate falls after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// Half a cosine down towards the final rate.
    #[default]
    Cosine,
    /// Constant, then linear down towards the final rate over the last `decay_steps` steps (warm-up, stable, decay).
    /// The first of them still has the constant rate.
    Wsd,
}

impl Named for ScheduleKind {
    const ALL: &'static [(&'static str, Self)] = &[("cosine", ScheduleKind::Cosine), ("wsd", ScheduleKind::Wsd)];
}

settings! {
    /// The loop and the optimizer.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    pub struct TrainingSettings {
        /// Optimizer steps.
        steps: u64 = 1000, |s, key, m| s.integer(key, 1, MAX_STEPS, m);
        /// Sequences in an optimizer step.
        batch: usize = 16, |s, key, m| s.size(key, m);
        /// Sequences in a forward pass; `batch` must be a multiple of it. Gradients of the passes of a step are added.
        /// All of them if absent.
        micro_batch: Option<usize> = None, |s, key, m| s.size(key, m).map(Some);
        /// The learning rate after the warm-up.
        learning_rate: f64 = 1e-3, |s, key, m| s.number(key, POSITIVE, m);
        /// The learning rate that the fall goes to. It would be reached one step after the last one, so the last step's
        /// rate is a little higher.
        final_learning_rate: f64 = 1e-4, |s, key, m| s.number(key, NOT_NEGATIVE, m);
        /// Steps over which the learning rate rises linearly.
        warm_up: u64 = 50, |s, key, m| s.integer(key, 0, MAX_STEPS, m);
        /// How it falls.
        schedule: ScheduleKind = ScheduleKind::Cosine, |s, key, m| s.choice(key, m);
        /// Steps of the fall of the schedule `wsd`: at least 2, or 0 for a constant rate; a fifth of all steps if
        /// absent.
        decay_steps: Option<u64> = None, |s, key, m| s.integer(key, 0, MAX_STEPS, m).map(Some);
        /// The optimizer.
        #[serde(skip_serializing_if = "is_default")]
        optimizer: OptimizerKind = OptimizerKind::Adamw, |s, key, m| s.choice(key, m);
        /// The share of the momentum that a step of [`OptimizerKind::Sgd`] keeps.
        momentum: f64 = 0.9, |s, key, m| s.number(key, MOMENT, m);
        /// Weight decay of matrices; biases and norms have none. Decoupled in AdamW, added to the gradient in gradient
        /// descent.
        weight_decay: f64 = 0.1, |s, key, m| s.number(key, NOT_NEGATIVE, m);
        /// Decay rate of the first moment.
        beta1: f64 = 0.9, |s, key, m| s.number(key, MOMENT, m);
        /// Decay rate of the second moment.
        beta2: f64 = 0.95, |s, key, m| s.number(key, MOMENT, m);
        /// Added to the root of the second moment.
        epsilon: f64 = 1e-8, |s, key, m| s.number(key, POSITIVE, m);
        /// Gradients are scaled down to this global norm where theirs is larger; no limit if 0.
        clip_norm: f64 = 1.0, |s, key, m| s.number(key, NOT_NEGATIVE, m);
        /// The data type of activations and of GEMMs.
        precision: Precision = Precision::Automatic, |s, key, m| s.choice(key, m);
        /// Decides initial weights, batches and random estimates.
        seed: u64 = 0, |s, key, m| s.integer(key, 0, LARGEST_SEED, m);
        /// Steps between two evaluations of the validation loss; only at the end if 0.
        validate_every: u64 = 100, |s, key, m| s.integer(key, 0, MAX_STEPS, m);
        /// Sequences of an evaluation.
        validation_sequences: usize = 64, |s, key, m| s.size(key, m);
        /// Steps between two checkpoints; only at the end if 0.
        checkpoint_every: u64 = 100, |s, key, m| s.integer(key, 0, MAX_STEPS, m);
        /// Checkpoints to keep beside the best one.
        keep_checkpoints: usize = 1, |s, key, m| s.integer(key, 1, 1000, m).map(|n| n as usize);
        /// Whether the tables of a decoder's tokens, embedding and head, stay as they are.
        #[serde(skip_serializing_if = "is_default")]
        frozen_embeddings: bool = false, |s, key, m| s.boolean(key, m);
        /// Whether a run of a `vit` ends with logistic regression on its features
        /// ([`ImageSet::probe`](super::ImageSet::probe)).
        #[serde(skip_serializing_if = "is_default")]
        linear_probe: bool = false, |s, key, m| s.boolean(key, m);
    }
}

impl TrainingSettings {
    /// Sequences in a forward pass.
    pub fn micro_batch(&self) -> usize {
        self.micro_batch.unwrap_or(self.batch)
    }

    /// Steps of the fall of the learning rate at the end.
    pub fn decay_steps(&self) -> u64 {
        match self.schedule {
            ScheduleKind::Cosine => self.steps.saturating_sub(self.warm_up),
            ScheduleKind::Wsd => self.decay_steps.unwrap_or(self.steps / 5),
        }
    }
}

/// Checks the settings of the loop.
pub(super) fn check(settings: &TrainingSettings) -> Result<()> {
    let fault = |what, found: String, expected| Err(Error::Setting { what, found, expected });
    if settings.batch == 0 || settings.steps == 0 {
        let found = format!("{} and {}", settings.batch, settings.steps);
        return fault("batch and steps", found, "at least 1 each");
    }
    if let Some(micro) = settings.micro_batch
        && (micro == 0 || !settings.batch.is_multiple_of(micro))
    {
        let found = format!("{micro} for a batch of {}", settings.batch);
        return fault("micro_batch", found, "a divisor of the batch");
    }
    for (what, beta) in [("momentum", settings.momentum), ("beta1", settings.beta1), ("beta2", settings.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return fault(what, beta.to_string(), "from 0 up to, but not including, 1");
        }
    }
    for (what, value) in
        [("weight_decay", settings.weight_decay), ("epsilon", settings.epsilon), ("clip_norm", settings.clip_norm)]
    {
        // Infinity does not clip.
        if value.is_nan() || value < 0.0 || (value.is_infinite() && what != "clip_norm") {
            return fault(what, value.to_string(), "a finite number from 0 up");
        }
    }
    Schedule::new(settings).map(|_| ())
}
