//! The folder of a training run, as models are read from it: the checkpoint's file, the weights in it, and the
//! tokenizer.

mod file;
mod scales;
mod weights;

use std::path::{Path, PathBuf};

use serde::Deserialize;

pub use file::{CHECKPOINT_FILE, is_checkpoint};
pub(crate) use file::{STATE_KEY, SavedLayer, SummingWriter, expect_whole, mask_beside, mask_key, mask_of, state_of};
pub(crate) use scales::WeightScales;
pub(super) use weights::CheckpointModel;

use super::{CheckpointError, SavedModel, Tokenizer};
use crate::Result;

/// The recipe in the folder of a training run.
const RECIPE_FILE: &str = "recipe.toml";

/// The folder of a training run, with what its recipe says of the model that training started from.
pub(super) struct Run {
    folder: PathBuf,
    recipe: RunRecipe,
}

#[derive(Deserialize)]
struct RunRecipe {
    #[serde(default)]
    model: RunModel,
    #[serde(default)]
    data: RunData,
}

#[derive(Default, Deserialize)]
struct RunModel {
    from: Option<PathBuf>,
}

#[derive(Default, Deserialize)]
struct RunData {
    /// `bytes`, `checkpoint`, or the path of a file.
    tokenizer: Option<String>,
}

impl Run {
    /// The run that a checkpoint's file is of; none for another file.
    ///
    /// # Errors
    /// A recipe that cannot be read.
    pub(super) fn of(path: &Path) -> Result<Option<Self>> {
        if path.file_name().is_none_or(|name| name != CHECKPOINT_FILE) {
            return Ok(None);
        }
        // A checkpoint's folder is in the run's, or in one that is.
        let full = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let Some(folder) = full.ancestors().skip(2).take(2).find(|folder| folder.join(RECIPE_FILE).is_file()) else {
            return Ok(None);
        };
        let path = folder.join(RECIPE_FILE);
        let fault = |reason: String| CheckpointError::NotAConfig { path: path.clone(), reason };
        let text = std::fs::read_to_string(&path).map_err(|error| fault(error.to_string()))?;
        let recipe = toml::from_str(&text).map_err(|error| fault(error.to_string()))?;
        Ok(Some(Run { folder: folder.to_owned(), recipe }))
    }

    /// The folder of the model in transformers' format that the run leaves.
    pub(super) fn model_folder(&self) -> PathBuf {
        self.folder.join(SavedModel::DIRECTORY)
    }

    /// The model that training started from.
    pub(super) fn from(&self) -> Option<PathBuf> {
        self.recipe.model.from.as_ref().map(|from| self.folder.join(from))
    }

    /// The tokenizer of a decoder's run.
    ///
    /// # Errors
    /// Those of [`Tokenizer::read`] and [`SavedModel::open`].
    pub(super) fn tokenizer(&self) -> Result<Tokenizer> {
        let own = self.model_folder().join("tokenizer.json");
        if own.is_file() {
            return Tokenizer::read(&own);
        }
        let saved = || self.from().map(SavedModel::open).transpose();
        match self.recipe.data.tokenizer.as_deref() {
            Some("bytes") => Ok(Tokenizer::Bytes),
            None | Some("checkpoint") => saved()?.map_or(Ok(Tokenizer::Bytes), |saved| saved.tokenizer()),
            Some(path) => Tokenizer::read(&self.folder.join(path)),
        }
    }
}
