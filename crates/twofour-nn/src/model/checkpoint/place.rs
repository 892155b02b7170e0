//! Where a checkpoint is: its directory, its configuration and its files of weights.

use std::path::{Path, PathBuf};

use twofour::file::{ConfiguredWeights, Reader};

use super::{CONFIG_FILE, CheckpointError};
use crate::{
    Result,
    model::{
        families::fields::Fields,
        file,
        run::{CHECKPOINT_FILE, MODEL_DIRECTORY, MODEL_FILES},
    },
};

/// The directory of a checkpoint that a path names: the path, or, of a file of weights or an index, the directory that
/// holds it.
pub(super) fn directory_of(path: &Path) -> PathBuf {
    if !path.is_file() {
        return path.to_owned();
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new(".")).to_owned()
}

/// Opens a weight file that contains its configuration (GGUF); none for another path.
fn configured(path: &Path) -> Option<Reader> {
    let reader = path.is_file().then(|| Reader::open(path).ok())??;
    (!reader.described().is_empty()).then_some(reader)
}

/// Returns true for a directory with config.json, for a weight file that contains its configuration (GGUF), and for a
/// weight file beside a config.json unless it describes itself, as [`Gpt::save`](crate::model::Gpt::save) writes.
pub(super) fn is_checkpoint(path: &Path) -> bool {
    let has_config = directory_of(path).join(CONFIG_FILE).symlink_metadata().is_ok();
    let is_of_weights = || Reader::open(path).is_ok_and(|reader| !file::describes_itself(&reader));
    has_config && (path.is_dir() || is_of_weights()) || configured(path).is_some()
}

/// The model that a path means: itself, or, of the folder of a training run or a quickstart, the model in it, or, of a
/// folder of a run's checkpoint (`last`, `best`), the checkpoint's file.
pub(in crate::model) fn locate(path: &Path) -> PathBuf {
    let inside = path.join(MODEL_DIRECTORY);
    if is_checkpoint(path) || !path.is_dir() {
        path.to_owned()
    } else if is_checkpoint(&inside) {
        inside
    } else {
        let files = MODEL_FILES.into_iter().chain([CHECKPOINT_FILE]).map(|name| path.join(name));
        files.into_iter().find(|file| file.exists()).unwrap_or_else(|| path.to_owned())
    }
}

/// The configuration of a checkpoint.
pub(super) fn fields_of(path: &Path) -> Result<Fields> {
    match configured(path) {
        Some(reader) => Ok(Fields::parse(path, &reader.beside(CONFIG_FILE)?.unwrap_or_default())?),
        None => Ok(Fields::read(&directory_of(path).join(CONFIG_FILE))?),
    }
}

/// The files of weights of a checkpoint, with experts taken apart; those of other tools' formats that this library
/// reads are its own there.
///
/// # Errors
/// [`CheckpointError::ForeignWeights`] where the configuration says that another tool quantized or compressed them;
/// those of [`Reader::open`].
pub(super) fn reader_of(path: &Path, fields: &Fields) -> Result<Reader> {
    let reader = Reader::open(path)?.translated()?.unstacked(|_| true)?;
    // A weight that this program compressed, or reads, is read whatever tool's name the configuration has for its form.
    let is_ours = reader.compressed_weights().next().is_some() || !reader.translation().weights.is_empty();
    match ConfiguredWeights::of(fields.values()) {
        ConfiguredWeights::Foreign { by } if !is_ours => {
            Err(CheckpointError::ForeignWeights { path: fields.path().to_owned(), by }.into())
        }
        _ => Ok(reader),
    }
}
