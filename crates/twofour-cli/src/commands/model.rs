//! The model that a command runs.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use twofour::DataType;
use twofour_nn::model::{LanguageModel, SavedModel};

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
    /// Opens it, without reading its weights, with the type to compute in.
    pub(crate) fn open(&self) -> Result<(SavedModel, DataType)> {
        let saved = SavedModel::open(&self.model)?;
        let dtype = self.dtype.unwrap_or_else(|| saved.dtype());
        Ok((saved, dtype))
    }

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
        Ok(LanguageModel::load(SavedModel::locate(&self.model), self.dtype)?)
    }
}
