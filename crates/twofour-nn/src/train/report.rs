//! What a training step did, and what a validation found.

use serde::Serialize;

/// What one training step did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepReport {
    /// The step, counted from 0.
    pub step: u64,
    /// The batch's mean loss before the update, in nats a target.
    pub loss: f64,
    /// The learning rate of the update.
    pub learning_rate: f64,
    /// The global norm of the gradients before clipping.
    pub gradient_norm: f64,
    /// Share of the mask elements of all 2:4 and masked layers that changed after the update; 0 where no mask was
    /// selected.
    pub flip_rate: f64,
    /// The flip rate of each 2:4 or masked layer, in the model's order: 0 for a layer that kept its mask; empty where
    /// no mask was selected.
    pub layer_flip_rates: Vec<f64>,
    /// Share of the elements of the plan's observed masks that changed after the update, where it has such.
    pub observed_flip_rate: Option<f64>,
    /// Whether layers were 2:4 in this step.
    pub is_sparse: bool,
    /// Whether the update was skipped because the loss or a gradient was not finite.
    pub skipped: bool,
    /// Updates skipped so far.
    pub skipped_so_far: u64,
    /// Targets predicted: tokens, or images.
    pub targets: usize,
    /// Seconds that the step took.
    pub seconds: f64,
}

/// What a model does on the validation part.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Evaluation {
    /// The mean loss, in nats a target.
    pub loss: f64,
    /// The share of targets that were the model's first choice, of a classifier.
    pub accuracy: Option<f64>,
}
