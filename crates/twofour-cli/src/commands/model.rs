//! The model that a command runs.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use twofour::DataType;
use twofour_nn::model::{Checkpoint, LanguageModel};

use crate::dtype::computing;

/// Which model, and how it computes.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    /// A checkpoint's directory (config.json, safetensors, tokenizer.json), the folder of `train` or of `quickstart`, or a file of these; dense, pruned or compressed
    model: PathBuf,

    /// What to compute in: f32, bf16 or f16 [default: the type of the weights]
    #[arg(long, value_name = "DTYPE", value_parser = computing())]
    dtype: Option<DataType>,
}

impl ModelArguments {
    /// The model's path.
    pub(crate) fn directory(&self) -> &Path {
        &self.model
    }

    /// The type to compute in, where one was given.
    pub(crate) fn dtype(&self) -> Option<DataType> {
        self.dtype
    }

    /// Loads it.
    pub(crate) fn load(&self) -> Result<LanguageModel> {
        let of_folder = ["sparse.safetensors", "model.safetensors"].map(|name| self.model.join(name));
        let path = match Checkpoint::is_at(&self.model) {
            true => None,
            false => of_folder.into_iter().find(|file| file.exists()),
        };
        Ok(LanguageModel::load(path.as_ref().unwrap_or(&self.model), self.dtype)?)
    }
}
