//! `report.json`.

use serde::{Deserialize, Serialize};

use super::Plan;
use crate::measure::Machine;

/// What a run found.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The dense model.
    pub(crate) dense: Side,
    /// The 2:4 model.
    pub(crate) sparse: Side,
    /// Where it was measured.
    pub(crate) machine: Machine,
    /// What was trained and how.
    pub(crate) config: Plan,
    /// Steps that each model was trained; fewer than planned where the machine was busier than when the steps were timed.
    pub(crate) steps: u64,
    /// Seconds that the run took, all of it.
    pub(crate) seconds: f64,
    /// Bytes of unseen text that the validation losses are the mean over.
    pub(crate) validation_bytes: usize,
    /// Bytes of text, training and validation together.
    pub(crate) text_bytes: usize,
    /// What the 2:4 model writes, after this prompt.
    pub(crate) prompt: String,
    /// Its continuation.
    pub(crate) sample: String,
}

/// One of the two models.
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
    /// Bytes written a second, one after the other, in f32.
    pub(crate) decode_tokens_per_s: f64,
    /// Bytes read a second, a whole context at once, in f32.
    pub(crate) prefill_tokens_per_s: f64,
    /// Milliseconds that a training step took on average.
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
