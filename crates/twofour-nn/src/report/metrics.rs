//! A line of `metrics.jsonl`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One optimizer step. What was not measured at a step is absent from its line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The step, counted from 0.
    pub step: u64,
    /// The batch's loss before the update, in nats a token; absent where it is not finite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// The learning rate of the update.
    pub learning_rate: f64,
    /// The global norm of the gradients before clipping; absent where it is not finite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_norm: Option<f64>,
    /// Whether the update was left out because loss or gradients were NaN or infinite.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
    /// The share of all mask elements that changed after the update; 0 at steps that chose no mask.
    pub flip_rate: f64,
    /// The share of the elements of observed masks that changed after the update, where there are such.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_flip_rate: Option<f64>,
    /// The strength of the decay of pruned weights, where trial runs decided it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay: Option<f64>,
    /// The loss on the validation part after the update, where it was evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// The share of validation images that are classified rightly, where it was evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub val_accuracy: Option<f64>,
    /// The mask of each 2:4 or masked layer: at steps that evaluated the validation loss, and, where masks are chosen
    /// rarely, at steps that chose them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub layers: BTreeMap<String, LayerMetrics>,
    /// Tokens trained on a second.
    pub tokens_per_s: f64,
}

/// The mask of a layer at a step.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct LayerMetrics {
    /// The share of mask elements that changed, at steps that chose the mask anew.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flip_rate: Option<f64>,
    /// The share of the magnitudes of the master weight that the mask keeps, where the validation loss was evaluated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<f64>,
    /// The level of a sparsifier's mask when it was chosen last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<f64>,
}
