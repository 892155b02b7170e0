//! The settings of a training run, as a TOML file has them.
//!
//! - [`Recipe::parse`], [`LoadedRecipe::read`]: from a file to settings; every mistake is reported at once, with its
//!   line.
//! - [`Override`]: a value that replaces one of the recipe's.
//! - [`Recipe::sparsity_plan`]: what a method means: mask, gradients, decay, and when layers are 2:4.
//! - [`Recipe::model_config`], [`Recipe::saved_model`]: the model's description, and the model that training starts
//!   from.
//! - [`Recipe::layers`]: which linear layers become 2:4, and why the others do not.
//! - [`Recipe::plan`]: parameters, memory, steps and tokens, before anything is done.

mod check;
mod data;
mod distillation;
mod encoder;
mod layers;
mod load;
mod model;
mod parse;
mod plan;
mod sections;
mod sparsity;
mod start;
#[cfg(test)]
mod tests;
mod trained;

use serde::{Deserialize, Serialize};

pub use crate::{
    settings::{Mistake, Mistakes, NotAnOverride, Override, Place},
    train::{
        OptimizerKind, Precision, ScheduleKind, TrainingSettings,
        methods::{
            DecayStrength, DecayTarget, Defaults, LayerOverride, LevelScheduleKind, METHODS, Method, Searched,
            SparsifierCriterion, SparsifierKind, SparsifierSettings, SparsitySettings, SwitchMean,
        },
    },
};
pub use data::{DataSettings, Tokenizer};
pub use distillation::DistillationSettings;
pub use layers::LayerPlan;
pub use load::{LoadedData, LoadedRecipe, RecipeError};
pub use model::{ModelConfig, ModelKind, ModelSettings};
pub use plan::{DeviceKind, LevelPlan, MemoryPlan, RecipePlan, StagePlan};
pub use start::ModelSource;
pub use trained::RecipeData;

/// A training run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// The model.
    pub model: ModelSettings,
    /// What it is trained on.
    pub data: DataSettings,
    /// The loop and the optimizer.
    pub training: TrainingSettings,
    /// Which layers are 2:4, when, and how they are trained.
    #[serde(default)]
    pub sparsity: SparsitySettings,
    /// What the model learns from beside the text; cross-entropy alone if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distillation: Option<DistillationSettings>,
    /// What the files say that [`ModelSettings::from`] and [`DataSettings::tokenizer`] name; absent where they name
    /// none. [`Recipe::parse`] reads it.
    #[serde(skip)]
    pub source: Option<ModelSource>,
}
