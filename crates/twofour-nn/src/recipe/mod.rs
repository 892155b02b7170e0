//! The settings of a training run, as a TOML file has them.

mod data;
mod model;
mod sparsity;
mod training;

use serde::{Deserialize, Serialize};

pub use data::{DataSettings, Tokenizer};
pub use model::{ModelKind, ModelSettings};
pub use sparsity::{DecayTarget, Method, SparsitySettings};
pub use training::{Precision, ScheduleKind, TrainingSettings};

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
}
