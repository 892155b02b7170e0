//! The loop and the optimizer of a recipe.

use serde::{Deserialize, Serialize};

use super::reader::{Named, name_of};

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

impl OptimizerKind {
    fn is_adamw(&self) -> bool {
        *self == OptimizerKind::Adamw
    }
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
    /// Constant, then linear down towards the final rate over the last `decay_steps` steps (warm-up, stable, decay). The first of them still has the
    /// constant rate.
    Wsd,
}

impl Named for ScheduleKind {
    const ALL: &'static [(&'static str, Self)] = &[("cosine", ScheduleKind::Cosine), ("wsd", ScheduleKind::Wsd)];
}

/// The loop and the optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TrainingSettings {
    /// Optimizer steps.
    pub steps: u64,
    /// Sequences in an optimizer step.
    pub batch: usize,
    /// Sequences in a forward pass; `batch` must be a multiple of it. Gradients of the passes of a step are added. All of them if absent.
    pub micro_batch: Option<usize>,
    /// The learning rate after the warm-up.
    pub learning_rate: f64,
    /// The learning rate that the fall goes to. It would be reached one step after the last one, so the last step's rate is a little higher.
    pub final_learning_rate: f64,
    /// Steps over which the learning rate rises linearly.
    pub warm_up: u64,
    /// How it falls.
    pub schedule: ScheduleKind,
    /// Steps of the fall of the schedule `wsd`: at least 2, or 0 for a constant rate; a fifth of all steps if absent.
    pub decay_steps: Option<u64>,
    /// The optimizer.
    #[serde(skip_serializing_if = "OptimizerKind::is_adamw")]
    pub optimizer: OptimizerKind,
    /// The share of the momentum that a step of [`OptimizerKind::Sgd`] keeps.
    pub momentum: f64,
    /// Weight decay of matrices; biases and norms have none. Decoupled in AdamW, added to the gradient in gradient descent.
    pub weight_decay: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Gradients are scaled down to this global norm where theirs is larger; no limit if 0.
    pub clip_norm: f64,
    /// The data type of activations and of GEMMs.
    pub precision: Precision,
    /// Decides initial weights, batches and random estimates.
    pub seed: u64,
    /// Steps between two evaluations of the validation loss; only at the end if 0.
    pub validate_every: u64,
    /// Sequences of an evaluation.
    pub validation_sequences: usize,
    /// Steps between two checkpoints; only at the end if 0.
    pub checkpoint_every: u64,
    /// Checkpoints to keep beside the best one.
    pub keep_checkpoints: usize,
    /// Whether a run of a `vit` ends with logistic regression on its features ([`Vit::probe`](crate::model::Vit::probe)).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub linear_probe: bool,
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

impl Default for TrainingSettings {
    fn default() -> Self {
        Self {
            steps: 1000,
            batch: 16,
            micro_batch: None,
            learning_rate: 1e-3,
            final_learning_rate: 1e-4,
            warm_up: 50,
            schedule: ScheduleKind::Cosine,
            decay_steps: None,
            optimizer: OptimizerKind::Adamw,
            momentum: 0.9,
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            clip_norm: 1.0,
            precision: Precision::Automatic,
            seed: 0,
            validate_every: 100,
            validation_sequences: 64,
            checkpoint_every: 100,
            keep_checkpoints: 1,
            linear_probe: false,
        }
    }
}
