//! `report.json`.

use serde::{Deserialize, Serialize};

use super::Plan;
use crate::measure::Machine;

/// The results of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The dense model.
    pub(crate) dense: Side,
    /// The 2:4 model.
    pub(crate) sparse: Side,
    /// The machine that it was measured on.
    pub(crate) machine: Machine,
    /// The plan of the run.
    pub(crate) config: Plan,
    /// Steps that each model was trained; fewer than planned where the machine was busier than when the steps were
    /// timed.
    pub(crate) steps: u64,
    /// Duration of the whole run in seconds.
    pub(crate) seconds: f64,
    /// Bytes of validation text that the losses are averaged over.
    pub(crate) validation_bytes: usize,
    /// Bytes of text, training and validation together.
    pub(crate) text_bytes: usize,
    /// The prompt of the sample.
    pub(crate) prompt: String,
    /// The 2:4 model's continuation of the prompt.
    pub(crate) sample: String,
}

/// The results of one model.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Side {
    /// Loss on text that was not trained on, in nats a byte.
    pub(crate) val_loss: f32,
    /// Bytes of the weights that are under 2:4 in the sparse model, in bf16.
    pub(crate) weight_bytes: usize,
    /// Bytes of the model's file.
    pub(crate) file_bytes: u64,
    /// Bytes of all linear layers' weights in memory while the speed is measured, in f32.
    pub(crate) memory_bytes: usize,
    /// Decode speed in f32, batch 1: bytes (tokens) per second.
    pub(crate) decode_tokens_per_s: f64,
    /// Prefill speed in f32, one full context: bytes (tokens) per second.
    pub(crate) prefill_tokens_per_s: f64,
    /// Mean time of a training step in milliseconds.
    pub(crate) train_step_ms: f64,
}

/// 2:4 against dense, one number for each row of the table: how many times smaller or faster.
impl Report {
    /// How many times smaller the weights are.
    pub(crate) fn size_ratio(&self) -> f64 {
        self.dense.weight_bytes as f64 / self.sparse.weight_bytes as f64
    }

    /// How many times faster it decodes.
    pub(crate) fn decode_ratio(&self) -> f64 {
        self.sparse.decode_tokens_per_s / self.dense.decode_tokens_per_s
    }

    /// How many times faster it prefills.
    pub(crate) fn prefill_ratio(&self) -> f64 {
        self.sparse.prefill_tokens_per_s / self.dense.prefill_tokens_per_s
    }
}
