//! A model on disk that training can start from.

use std::path::{Path, PathBuf};

use twofour::{DataType, Mask, file::Reader};

use super::{
    Checkpoint, Gpt, StoredRows, Tokenizer, TransformerConfig, VOCABULARY,
    checkpoint::locate,
    file,
    run::{MODEL_DIRECTORY, MODEL_FILES, Run, RunTokenizer},
    violations::{beyond_mask, violation},
};
use crate::{Error, Result, engine::Engine, text::ChatTemplate};

/// The table of learned positions.
const POSITIONS: &str = "positions.weight";

/// A model on disk whose configuration and headers were read and checked: a checkpoint of transformers, or a file that
/// [`Gpt::save`] wrote.
#[derive(Debug)]
pub struct SavedModel {
    source: Source,
    config: TransformerConfig,
}

#[derive(Debug)]
enum Source {
    Checkpoint(Box<Checkpoint>),
    File(Box<Reader>),
}

impl SavedModel {
    /// The directory that a training run leaves a model in that transformers can load.
    pub const DIRECTORY: &'static str = MODEL_DIRECTORY;

    /// The files that a quickstart and a training run leave a model in, where transformers has none of its kind.
    pub const FILES: [&'static str; 2] = MODEL_FILES;

    /// The model that a path means: itself, or, of the folder of a training run or a quickstart, the model in it, or,
    /// of a folder of a run's checkpoint (`last`, `best`), the checkpoint's file.
    pub fn locate(path: impl AsRef<Path>) -> PathBuf {
        locate(path.as_ref())
    }

    /// Opens what [`SavedModel::locate`] finds.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`], [`Checkpoint::expect_head`] and [`Reader::open`]; a file that has no description
    /// of a model in its metadata.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = Self::locate(path);
        if Checkpoint::is_at(&path) {
            let checkpoint = Checkpoint::open(&path)?;
            checkpoint.expect_head()?;
            let config = checkpoint.config().clone();
            return Ok(SavedModel { source: Source::Checkpoint(Box::new(checkpoint)), config });
        }
        let reader = file::open(&path)?;
        let config = file::config_of(&reader)?;
        Ok(SavedModel { source: Source::File(Box::new(reader)), config })
    }

    /// The model's description.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// The checkpoint, unless the model is a file of [`Gpt::save`].
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.source {
            Source::Checkpoint(checkpoint) => Some(checkpoint),
            Source::File(_) => None,
        }
    }

    /// The files of weights.
    pub fn reader(&self) -> &Reader {
        match &self.source {
            Source::Checkpoint(checkpoint) => checkpoint.reader(),
            Source::File(reader) => reader,
        }
    }

    /// The type of the weights, as [`Checkpoint::dtype`].
    pub fn dtype(&self) -> DataType {
        file::dtype_of(self.reader())
    }

    /// The tokenizer: of a checkpoint of training, that of the run whose folder it is in; of another file, bytes.
    ///
    /// # Errors
    /// Those of [`Checkpoint::tokenizer`] and of the run's recipe; a file of a model over other tokens than bytes.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match &self.source {
            Source::Checkpoint(checkpoint) => checkpoint.tokenizer(),
            Source::File(reader) => tokenizer_beside(reader.path(), &self.config),
        }
    }

    /// The chat template.
    ///
    /// # Errors
    /// Those of [`ChatTemplate::beside`].
    pub fn chat_template(&self) -> Result<ChatTemplate> {
        ChatTemplate::beside(self.reader())
    }

    /// Reads the weights into a model that trains on sequences of up to `context` tokens; compressed ones are
    /// decompressed.
    ///
    /// # Errors
    /// A context that is longer than the model's; those of [`Checkpoint::model`] and [`Gpt::from_reader`].
    pub fn model<E: Engine>(&self, engine: &E, context: usize) -> Result<Gpt<E>> {
        if context > self.config.context() {
            let found = format!("{context} for a model of {}", self.config.context());
            return Err(Error::Setting { what: "context", found, expected: "at most the model's own" });
        }
        let config = self.config.clone().with_context(context);
        Gpt::build(engine, &config, |name, shape| self.values(name, shape))
    }

    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        // A model that trains on shorter sequences has the first of the learned positions.
        let whole = [self.config.context(), self.config.width];
        let stored = if name == POSITIONS { &whole } else { shape };
        let mut values = match &self.source {
            Source::Checkpoint(checkpoint) => checkpoint.parts().values(name)?,
            Source::File(reader) => file::values(reader, name, stored)?,
        };
        if name == POSITIONS {
            values.truncate(shape.iter().product());
        }
        Ok(values)
    }

    /// The first group of a linear layer's weight that has more than two nonzeros among its four, by the names of the
    /// stored weight; none where the weight is 2:4 along the input features. -0.0 counts as zero.
    ///
    /// # Errors
    /// A layer that the model does not have; those of reading.
    pub fn violation(&self, layer: &str) -> Result<Option<String>> {
        let linears = self.config.linear_layers();
        let Some((_, out_features, in_features)) = linears.into_iter().find(|(name, ..)| name == layer) else {
            let layers = self.config.linear_layers().into_iter().map(|(name, ..)| name).collect();
            return Err(Error::NoSuchLayer { pattern: layer.to_owned(), layers });
        };
        let stored = match &self.source {
            Source::Checkpoint(checkpoint) => checkpoint.stored(layer).map(|(names, _)| names).unwrap_or_default(),
            Source::File(_) => vec![format!("{layer}.weight")],
        };
        violation(self.reader(), &stored, (out_features, in_features), || {
            self.values(&format!("{layer}.weight"), &[out_features, in_features])
        })
    }

    /// The weights that make up a linear layer of so many output features.
    pub fn stored_rows(&self, layer: &str, out_features: usize) -> Vec<StoredRows> {
        match &self.source {
            Source::Checkpoint(checkpoint) => checkpoint.stored_rows(layer).unwrap_or_default(),
            Source::File(_) => {
                let rows = (0..out_features).collect();
                vec![StoredRows { module: layer.to_owned(), rows, is_transposed: false }]
            }
        }
    }

    /// The first nonzero of a linear layer's weight that a mask of its shape prunes; none where all of these are zero.
    ///
    /// # Errors
    /// No such layer, or one of another shape.
    pub fn mask_violation(&self, layer: &str, mask: &Mask) -> Result<Option<String>> {
        let values = self.values(&format!("{layer}.weight"), &[mask.rows(), mask.cols()])?;
        let expected = mask.rows() * mask.cols();
        if values.len() != expected {
            return Err(Error::length("a weight under its mask", expected, values.len()));
        }
        Ok(beyond_mask(&values, mask))
    }
}

/// The tokenizer of a model in a file.
///
/// # Errors
/// Those of [`SavedModel::tokenizer`].
pub(super) fn tokenizer_beside(path: &Path, config: &TransformerConfig) -> Result<Tokenizer> {
    if let Some(run) = Run::of(path)? {
        return tokenizer_of(&run);
    }
    match config.vocabulary() {
        VOCABULARY => Ok(Tokenizer::Bytes),
        other => Err(Error::Setting {
            what: "tokens of the model",
            found: other.to_string(),
            expected: "256, as of a model over bytes; the file has no tokenizer",
        }),
    }
}

/// The tokenizer of a decoder's run.
///
/// # Errors
/// Those of [`Tokenizer::read`] and [`SavedModel::open`].
fn tokenizer_of(run: &Run) -> Result<Tokenizer> {
    match run.tokenizer() {
        RunTokenizer::Bytes => Ok(Tokenizer::Bytes),
        RunTokenizer::File(path) => Tokenizer::read(&path),
        RunTokenizer::Model(path) => SavedModel::open(path)?.tokenizer(),
    }
}
