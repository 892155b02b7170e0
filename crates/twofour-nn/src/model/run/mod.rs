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

use super::CheckpointError;
use crate::Result;

/// The recipe in the folder of a training run.
const RECIPE_FILE: &str = "recipe.toml";

/// The directory that a training run leaves a model in that transformers can load.
pub(super) const MODEL_DIRECTORY: &str = "model";

/// The files that a quickstart and a training run leave a model in, where transformers has none of its kind.
pub(super) const MODEL_FILES: [&str; 2] = ["sparse.safetensors", "model.safetensors"];

/// Where the tokenizer of a decoder's run is.
pub(super) enum RunTokenizer {
    /// Tokens are bytes.
    Bytes,
    /// In a file.
    File(PathBuf),
    /// Beside the model that training started from.
    Model(PathBuf),
}

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
        self.folder.join(MODEL_DIRECTORY)
    }

    /// The model that training started from.
    pub(super) fn from(&self) -> Option<PathBuf> {
        self.recipe.model.from.as_ref().map(|from| self.folder.join(from))
    }

    /// Where the tokenizer of a decoder's run is.
    pub(super) fn tokenizer(&self) -> RunTokenizer {
        let own = self.model_folder().join("tokenizer.json");
        if own.is_file() {
            return RunTokenizer::File(own);
        }
        match self.recipe.data.tokenizer.as_deref() {
            Some("bytes") => RunTokenizer::Bytes,
            None | Some("checkpoint") => self.from().map_or(RunTokenizer::Bytes, RunTokenizer::Model),
            Some(path) => RunTokenizer::File(self.folder.join(path)),
        }
    }
}
