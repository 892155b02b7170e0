//! The model that a run leaves.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use twofour::{
    DataType, Mask,
    file::{Overwrite, Reader, expect_replaceable},
};
use twofour_nn::{
    linear::Linear,
    model::{Bert, EncoderCheckpoint, Gpt, SavedModel, Vit, is_llama, mask_violation, save_llama},
    recipe::Recipe,
};
use twofour_transformer::engine::Engine;

use super::folder::Folder;

/// A model of this program's own kind, in bf16, its 2:4 layers compressed.
pub(super) const MODEL: &str = "model.safetensors";

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
    /// The share of zeros in the layers that have masks of other patterns, as it was verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) zeros: Option<f64>,
}

/// What was found to be written as its masks have it.
#[derive(Debug, Default)]
struct Verified {
    /// Layers that are 2:4.
    two_of_four: usize,
    /// Zeros of the masks of other layers, and their elements.
    zeros: usize,
    elements: usize,
}

impl Verified {
    /// Checks a layer of a trained model; `of_pattern` says how the written one is not 2:4, and `of_mask` what it has
    /// that a mask prunes.
    fn add<E: Engine>(
        &mut self,
        path: &Path,
        linear: &Linear<E>,
        of_pattern: impl FnOnce() -> twofour_nn::Result<Option<String>>,
        of_mask: impl FnOnce(&Mask) -> twofour_nn::Result<Option<String>>,
    ) -> Result<()> {
        let what = match (linear.masked(), linear.is_two_of_four()) {
            (_, true) => {
                self.two_of_four += 1;
                of_pattern()?.map(|violation| format!("is not 2:4: {violation}"))
            }
            (Some((mask, _)), false) => {
                let elements = mask.rows() * mask.cols();
                self.zeros += elements - mask.count();
                self.elements += elements;
                of_mask(mask)?.map(|violation| format!("is not as its mask has it: {violation}"))
            }
            (None, false) => None,
        };
        match what {
            Some(what) => bail!("{}: \"{}\" was written and {what}", path.display(), linear.name()),
            None => Ok(()),
        }
    }

    /// The share of zeros in layers that have masks of other patterns.
    fn share_of_zeros(&self) -> Option<f64> {
        (self.elements > 0).then(|| self.zeros as f64 / self.elements as f64)
    }
}

impl Outcome {
    /// What it is, for people.
    pub(super) fn describe(&self) -> &'static str {
        match (self.is_checkpoint, self.two_of_four, self.zeros) {
            (true, 0, None) => "the model, dense, as transformers loads it",
            (true, 0, Some(_)) => "the model, its masked layers with zeros, as transformers loads it",
            (true, ..) => "the model, its 2:4 layers with zeros, as transformers loads it",
            (false, 0, None) => "the model, dense",
            (false, 0, Some(_)) => "the model, its masked layers with zeros",
            (false, ..) => "the model, its 2:4 layers compressed",
        }
    }
}

/// Writes the model: as a directory of transformers where it has a model of that kind, in the type of the checkpoint
/// that training started from or in bf16, and otherwise as a file. What is written is read again, and layers that are
/// 2:4 in the trainer must be there.
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
    let verified = verify(&path, model)?;
    if is_checkpoint {
        publish(folder, UNFINISHED, SavedModel::DIRECTORY)?;
    }
    let path = if is_checkpoint { SavedModel::DIRECTORY } else { MODEL };
    let (two_of_four, zeros) = (verified.two_of_four, verified.share_of_zeros());
    Ok(Outcome { path, dtype: dtype.to_string(), is_checkpoint, two_of_four, zeros })
}

/// Writes an encoder as a directory of transformers, in the type of the checkpoint that training started from. What is
/// written is read again, and layers that are 2:4 in the trainer must be there.
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
    let mut verified = Verified::default();
    for linear in model.linears() {
        let name = linear.name();
        verified.add(&path, linear, || written.violation(name), |mask| written.mask_violation(name, mask))?;
    }
    publish(folder, UNFINISHED, SavedModel::DIRECTORY)?;
    let (two_of_four, zeros) = (verified.two_of_four, verified.share_of_zeros());
    Ok(Outcome { path: SavedModel::DIRECTORY, dtype: dtype.to_string(), is_checkpoint: true, two_of_four, zeros })
}

/// Gives a directory that is finished its name.
pub(super) fn publish(folder: &Folder, from: &str, to: &str) -> Result<()> {
    let to = folder.file(to);
    if to.is_symlink() {
        expect_replaceable(&to, Overwrite::Yes)?;
    }
    remove(&to)?;
    fs::rename(folder.file(from), &to).with_context(|| to.display().to_string())
}

/// Writes a vision transformer: a file of this program's own kind, which is read again, and whose layers that are 2:4
/// in the trainer must be compressed there.
///
/// # Errors
/// Those of writing and of the engine; a layer that is not compressed in what was written.
pub(super) fn write_vit<E: Engine>(folder: &Folder, (engine, model): (&E, &Vit<E>)) -> Result<Outcome> {
    let path = folder.file(MODEL);
    model.save(engine, &path, Overwrite::Yes, DataType::BF16)?;
    let written = Reader::open(&path).context("reading the model that was written")?;
    let mut verified = Verified::default();
    for linear in model.linears() {
        let name = linear.weight().name();
        let is_compressed = || Ok(written.compressed_info(name).map(|_| None)?);
        verified.add(&path, linear, is_compressed, |mask| mask_violation(&written, name, mask))?;
    }
    let (two_of_four, zeros) = (verified.two_of_four, verified.share_of_zeros());
    Ok(Outcome { path: MODEL, dtype: DataType::BF16.to_string(), is_checkpoint: false, two_of_four, zeros })
}

/// Checks the layers that have masks in the trainer.
fn verify<E: Engine>(path: &Path, model: &Gpt<E>) -> Result<Verified> {
    let written = SavedModel::open(path).context("reading the model that was written")?;
    let mut verified = Verified::default();
    for linear in model.linears() {
        let name = linear.name();
        verified.add(path, linear, || written.violation(name), |mask| written.mask_violation(name, mask))?;
    }
    Ok(verified)
}

/// Removes a directory, where it exists.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{}: removing it", path.display()))
        }
        _ => Ok(()),
    }
}
