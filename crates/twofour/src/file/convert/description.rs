//! The files of an output directory that say what it holds: `config.json`, and a README where weights are packed.

use std::path::Path;

use serde_json::Value;

use super::super::{
    ConfiguredWeights, PACKED_README, Plan, Reader,
    configuration::{self, CONFIG_FILE},
    naming::README_TEXT,
};
use crate::{Error, Result};

/// Whether a file of that name, in the input's directory, is written anew.
pub(super) fn is_description(relative: &Path) -> bool {
    relative == Path::new(CONFIG_FILE) || relative == Path::new(PACKED_README)
}

/// Names and texts of the files that describe a directory with these tensors; `configuration` is the
/// `quantization_config` of another tool.
///
/// # Errors
/// A `config.json` that cannot be read, or that describes weights which another tool quantized where the output would
/// be packed.
pub(super) fn files(
    reader: &Reader,
    plans: &[Plan],
    configuration: Option<Value>,
) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let is_packed = plans.iter().any(Plan::is_packed);
    let mut files = Vec::new();
    if is_packed {
        files.push((PACKED_README, README_TEXT.as_bytes().to_vec()));
    }
    let is_of_directory = reader.directory().is_some() || !reader.described().is_empty();
    let Some(bytes) = is_of_directory.then(|| reader.beside(CONFIG_FILE)).transpose()?.flatten() else {
        return Ok(files);
    };
    let path = reader.path_beside(CONFIG_FILE);
    let fields = configuration::parse(&path, &bytes)?;
    // The input's own packed weights are what they are, whatever another tool's name says, and so are translated ones.
    let is_foreign =
        |reader: &Reader| reader.compressed_weights().next().is_none() && reader.translation().weights.is_empty();
    let text = match ConfiguredWeights::of(&fields) {
        ConfiguredWeights::Foreign { by } if is_foreign(reader) => {
            if is_packed || configuration.is_some() {
                let reason = format!(
                    "its quantization_config says that the weights are stored by another tool ({by}); packed weights \
                     would lose what it describes. \
                     Start from the model's unquantized checkpoint"
                );
                return Err(Error::Format { path, reason });
            }
            bytes
        }
        _ => {
            let field = configuration.or_else(|| is_packed.then(|| configuration::packed(dense_modules(plans))));
            configuration::rewritten(bytes, fields, field)
        }
    };
    files.push((CONFIG_FILE, text));
    Ok(files)
}

/// The modules whose two-dimensional weights stay dense.
fn dense_modules(plans: &[Plan]) -> Vec<String> {
    let matrices = plans.iter().flat_map(Plan::tensors).filter(|tensor| tensor.shape.len() == 2);
    let mut modules: Vec<String> =
        matrices.filter_map(|tensor| tensor.name.strip_suffix(".weight").map(str::to_owned)).collect();
    modules.sort_unstable();
    modules
}
