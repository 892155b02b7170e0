//! `report.json`.

use std::collections::BTreeMap;

use serde::Serialize;
use twofour_nn::{
    recipe::{LoadedRecipe, Recipe, RecipePlan},
    report::{LayerMetrics, StepMetrics},
    train::{DecayChoice, LinearProbe},
};

use super::{adapter::AdapterReport, outcome::Outcome};
use crate::measure::Machine;

/// Steps whose mean is the loss at the end: single batches are noisy.
const LAST_STEPS: usize = 20;

/// The results of a run.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Report {
    /// What losses are of: a token, an image.
    pub(super) target: &'static str,
    /// Loss on the validation part at the end, in nats a target.
    pub(super) val_loss: Option<f64>,
    /// The share of the validation images that are classified rightly at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) val_accuracy: Option<f64>,
    /// Logistic regression on the features of the images at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) linear_probe: Option<LinearProbe>,
    /// The lowest validation loss, and the number of steps after which it was measured.
    pub(super) best_val_loss: Option<f64>,
    pub(super) best_steps: Option<u64>,
    /// Mean training loss of the last steps.
    pub(super) loss: Option<f64>,
    /// Steps done.
    pub(super) steps: u64,
    /// Steps without an update, because loss or gradients were NaN or infinite.
    pub(super) skipped_steps: u64,
    /// Tokens trained on.
    pub(super) tokens: u64,
    /// Seconds in training steps, in this process and in those before it.
    pub(super) seconds: f64,
    /// Tokens a second, over all steps.
    pub(super) tokens_per_s: f64,
    /// Bytes of text and questions, or of pixels, training and validation together.
    pub(super) data_bytes: usize,
    /// Tokens of all samples.
    pub(super) data_tokens: usize,
    /// The model that the run left.
    pub(super) model: Outcome,
    /// The adapter that the run left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) adapter: Option<AdapterReport>,
    /// Masks when they were last measured.
    pub(super) masks: BTreeMap<String, LayerMetrics>,
    /// The strength of the decay of pruned weights that trial runs found, and what they found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) decay: Option<DecayChoice>,
    /// What was planned.
    pub(super) plan: RecipePlan,
    /// The recipe with its overrides and defaults.
    pub(super) recipe: Recipe,
    /// The machine.
    pub(super) machine: Machine,
    /// The version of this program.
    pub(super) version: &'static str,
}

impl Report {
    pub(super) fn new(
        (loaded, data_tokens, target): (&LoadedRecipe, usize, &'static str),
        plan: &RecipePlan,
        steps: &[StepMetrics],
        last: &StepMetrics,
        (decay, linear_probe, model, adapter): (
            Option<DecayChoice>,
            Option<LinearProbe>,
            Outcome,
            Option<AdapterReport>,
        ),
        machine: Machine,
    ) -> Self {
        let validated = steps.iter().filter_map(|step| Some((step.val_loss?, step.step + 1)));
        let best = validated.fold(None, |best: Option<(f64, u64)>, found| match best {
            Some(best) if best.0 <= found.0 => Some(best),
            _ => Some(found),
        });
        let recent = &steps[steps.len().saturating_sub(LAST_STEPS)..];
        let losses: Vec<f64> = recent.iter().filter_map(|step| step.loss).collect();
        let seconds: f64 = steps.iter().map(|step| plan.step_tokens as f64 / step.tokens_per_s).sum();
        let tokens = plan.step_tokens * steps.len() as u64;
        let masks = steps.iter().rev().find(|step| step.layers.values().any(|layer| layer.kept.is_some()));
        Report {
            target,
            val_loss: last.val_loss,
            val_accuracy: last.val_accuracy,
            linear_probe,
            best_val_loss: best.map(|(loss, _)| loss),
            best_steps: best.map(|(_, step)| step),
            loss: (!losses.is_empty()).then(|| losses.iter().sum::<f64>() / losses.len() as f64),
            steps: steps.len() as u64,
            skipped_steps: steps.iter().filter(|step| step.skipped).count() as u64,
            tokens,
            seconds,
            tokens_per_s: tokens as f64 / seconds.max(1e-9),
            data_bytes: loaded.data.bytes(),
            data_tokens,
            model,
            adapter,
            masks: masks.map(|step| step.layers.clone()).unwrap_or_default(),
            decay,
            plan: plan.clone(),
            recipe: loaded.recipe.clone(),
            machine,
            version: env!("CARGO_PKG_VERSION"),
        }
    }
}
