//! The model that a run leaves.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use twofour::{
    DataType,
    file::{Overwrite, Reader},
};
use twofour_nn::{
    engine::Engine,
    model::{Bert, EncoderCheckpoint, Gpt, SavedModel, TrainedModel as _, Vit, is_llama, save_llama},
    recipe::Recipe,
};

use super::folder::Folder;

/// A model of this program's own kind, in bf16, its 2:4 layers compressed.
const MODEL: &str = "model.safetensors";

/// The directory while it is written.
const UNFINISHED: &str = ".model.tmp";

/// The model that a run leaves.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Outcome {
    /// The file or directory in the run's folder.
    pub(super) path: &'static str,
    /// The type of the weights.
    pub(super) dtype: String,
    /// Whether transformers loads it.
    pub(super) is_checkpoint: bool,
    /// Number of linear layers that are 2:4, as it was verified.
    pub(super) two_of_four: usize,
}

impl Outcome {
    /// What it is, for people.
    pub(super) fn describe(&self) -> &'static str {
        match (self.is_checkpoint, self.two_of_four) {
            (true, 0) => "the model, dense, as transformers loads it",
            (true, _) => "the model, its 2:4 layers with zeros, as transformers loads it",
            (false, 0) => "the model, dense",
            (false, _) => "the model, its 2:4 layers compressed",
        }
    }
}

/// Writes the model: as a directory of transformers where it has a model of that kind, in the type of the checkpoint that training started from or in bf16, and otherwise as a
/// file. What is written is read again, and layers that are 2:4 in the trainer must be there.
///
/// # Errors
/// Those of writing and of the engine; a layer that is not 2:4 in what was written.
pub(super) fn write<E: Engine>(folder: &Folder, recipe: &Recipe, (engine, model): (&E, &Gpt<E>)) -> Result<Outcome> {
    let saved = recipe.saved_model()?;
    let checkpoint = saved.as_ref().and_then(SavedModel::checkpoint);
    let dtype = checkpoint.map_or(DataType::BF16, |checkpoint| checkpoint.dtype());
    let is_checkpoint = checkpoint.is_some() || is_llama(model.config());
    let place = if is_checkpoint { UNFINISHED } else { MODEL };
    let path = folder.file(place);
    if is_checkpoint {
        remove(&path)?;
    }
    match checkpoint {
        Some(checkpoint) => checkpoint.save((engine, model), &path, Overwrite::Yes, dtype)?,
        None if is_checkpoint => {
            save_llama((engine, model), &recipe.text_tokenizer()?, &path, Overwrite::Yes, dtype)?;
        }
        None => model.save(engine, &path, Overwrite::Yes, dtype)?,
    }
    let two_of_four = verify(&path, model)?;
    if is_checkpoint {
        publish(folder)?;
    }
    let path = if is_checkpoint { SavedModel::DIRECTORY } else { MODEL };
    Ok(Outcome { path, dtype: dtype.to_string(), is_checkpoint, two_of_four })
}

/// Writes an encoder as a directory of transformers, in the type of the checkpoint that training started from. What is written is read again, and layers that are 2:4 in the
/// trainer must be there.
///
/// # Errors
/// Those of writing and of the engine; a layer that is not 2:4 in what was written.
pub(super) fn write_encoder<E: Engine>(
    folder: &Folder,
    recipe: &Recipe,
    (engine, model): (&E, &Bert<E>),
) -> Result<Outcome> {
    let saved = recipe.saved_encoder()?.context("the recipe names no checkpoint to start from")?;
    let (path, dtype) = (folder.file(UNFINISHED), saved.dtype());
    remove(&path)?;
    saved.save((engine, model), &path, Overwrite::Yes, dtype)?;
    let written = EncoderCheckpoint::open(&path).context("reading the model that was written")?;
    let mut two_of_four = 0;
    for linear in model.linears().filter(|linear| linear.sparse().is_some()) {
        if let Some(violation) = written.violation(linear.name())? {
            bail!("{}: \"{}\" was written and is not 2:4: {violation}", path.display(), linear.name());
        }
        two_of_four += 1;
    }
    publish(folder)?;
    Ok(Outcome { path: SavedModel::DIRECTORY, dtype: dtype.to_string(), is_checkpoint: true, two_of_four })
}

/// Gives a directory that is finished its name.
fn publish(folder: &Folder) -> Result<()> {
    let to = folder.file(SavedModel::DIRECTORY);
    remove(&to)?;
    fs::rename(folder.file(UNFINISHED), &to).with_context(|| to.display().to_string())
}

/// Writes a vision transformer: a file of this program's own kind, which is read again, and whose layers that are 2:4 in the trainer must be compressed there.
///
/// # Errors
/// Those of writing and of the engine; a layer that is not compressed in what was written.
pub(super) fn write_vit<E: Engine>(folder: &Folder, (engine, model): (&E, &Vit<E>)) -> Result<Outcome> {
    let path = folder.file(MODEL);
    model.save(engine, &path, Overwrite::Yes, DataType::BF16)?;
    let written = Reader::open(&path).context("reading the model that was written")?;
    let mut two_of_four = 0;
    for linear in model.linears().filter(|linear| linear.sparse().is_some()) {
        let name = linear.weight().name();
        written.compressed_info(name).with_context(|| format!("\"{name}\" was written and is not 2:4"))?;
        two_of_four += 1;
    }
    Ok(Outcome { path: MODEL, dtype: DataType::BF16.to_string(), is_checkpoint: false, two_of_four })
}

/// Checks the layers that are 2:4 in the trainer; returns their number.
fn verify<E: Engine>(path: &Path, model: &Gpt<E>) -> Result<usize> {
    let written = SavedModel::open(path).context("reading the model that was written")?;
    let mut count = 0;
    for linear in model.linears().filter(|linear| linear.sparse().is_some()) {
        if let Some(violation) = written.violation(linear.name())? {
            bail!("{}: \"{}\" was written and is not 2:4: {violation}", path.display(), linear.name());
        }
        count += 1;
    }
    Ok(count)
}

/// Removes a directory, where it exists.
fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{}: removing it", path.display()))
        }
        _ => Ok(()),
    }
}
