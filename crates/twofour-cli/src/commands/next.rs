//! The commands that may follow a command, as a person would type them.

use std::path::{Path, PathBuf};

use twofour::file::Reader;
use twofour_nn::model::{EncoderCheckpoint, SavedModel, is_checkpoint};

use crate::present::shell::word;

/// What runs a model that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `generate` and `eval --text`.
    Decoder,
    /// `advise`, and `eval --against` what it was.
    Encoder,
    /// Nothing: weights without a configuration that is known here.
    Weights,
}

fn kind(model: &Path) -> Kind {
    if SavedModel::open(model).is_ok() {
        Kind::Decoder
    } else if EncoderCheckpoint::open(SavedModel::locate(model)).is_ok() {
        Kind::Encoder
    } else {
        Kind::Weights
    }
}

/// Returns the commands that run a decoder and measure its perplexity, on `text` where it was measured before; for an
/// encoder the one that measures its speed. None for weights that nothing here runs.
pub(crate) fn run(model: &Path, text: Option<&Path>) -> Vec<String> {
    let path = word(model);
    match kind(model) {
        Kind::Decoder => {
            let text = text.map_or("TEXT".to_owned(), word);
            vec![format!("twofour generate {path}"), format!("twofour eval {path} --text {text}")]
        }
        Kind::Encoder => vec![format!("twofour advise {path}")],
        Kind::Weights => vec![],
    }
}

/// The command that says what became of an encoder; none for another model, which [`run`] has one for.
pub(crate) fn compare(model: &Path, before: &Path) -> Option<String> {
    let line = || format!("twofour eval {} --text TEXT --against {}", word(model), word(before));
    (kind(model) == Kind::Encoder).then(line)
}

/// Commands after text was generated with a model, `given` as a person named it and `located` where it is.
pub(crate) fn after_generating(given: &Path, located: &Path) -> Vec<String> {
    let measure = format!("twofour eval {} --text TEXT", word(given));
    [measure].into_iter().chain(check_if_dense(given, located)).collect()
}

/// Commands after a model was measured.
pub(crate) fn after_measuring(given: &Path, located: &Path) -> Vec<String> {
    let run = match kind(located) {
        Kind::Decoder => Some(format!("twofour generate {}", word(given))),
        Kind::Encoder => Some(format!("twofour advise {}", word(given))),
        Kind::Weights => None,
    };
    run.into_iter().chain(check_if_dense(given, located)).collect()
}

/// The command that tells whether a model is 2:4, and what to do with it then; none where it is compressed, or where
/// there are no files of one model.
fn check_if_dense(given: &Path, located: &Path) -> Option<String> {
    let reader = Reader::open(located).ok().filter(|reader| !is_checkpoint(reader))?;
    reader.compressed_weights().next().is_none().then(|| check(given))
}

/// The command that checks a model.
pub(crate) fn check(model: &Path) -> String {
    format!("twofour check {}", word(model))
}

/// The command that stores a 2:4 model compressed.
pub(crate) fn compress(model: &Path) -> String {
    format!("twofour compress {} -o {}", word(model), word(&beside(model, "compressed")))
}

/// The command that prunes a model.
pub(crate) fn prune(model: &Path) -> String {
    format!("twofour prune {} -o {}", word(model), word(&beside(model, "2of4")))
}

/// A path that nothing is at, for what a command makes of a model: beside it and named after it; of a sharded model a
/// directory.
fn beside(model: &Path, suffix: &str) -> PathBuf {
    let index = model.extension().is_some_and(|extension| extension == "json");
    let named = if index { model.parent().unwrap_or(Path::new("")) } else { model };
    let is_file = named.extension().is_some_and(|extension| extension == "safetensors") && !named.is_dir();
    let stem = if is_file { named.file_stem() } else { named.file_name() };
    let mut name = stem.map_or(std::ffi::OsString::new(), |stem| {
        let mut name = stem.to_owned();
        name.push("-");
        name
    });
    name.push(suffix);
    // A model of the hub has no folder here.
    let folder = if model.exists() { named.parent().unwrap_or(Path::new("")) } else { Path::new("") };
    let end = if is_file { ".safetensors" } else { "" };
    let numbered = |number: usize| {
        let mut name = name.clone();
        name.push(if number == 1 { end.to_owned() } else { format!("-{number}{end}") });
        folder.join(name)
    };
    let mut number = 1;
    while numbered(number).symlink_metadata().is_ok() {
        number += 1;
    }
    numbered(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_named_after_the_model_and_nothing_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("m.safetensors"), b"").unwrap();
        std::fs::write(at("n.safetensors"), b"").unwrap();
        std::fs::write(at("n-2of4.safetensors"), b"").unwrap();
        std::fs::create_dir(at("big")).unwrap();
        std::fs::write(at("big/model.safetensors.index.json"), b"").unwrap();
        assert_eq!(beside(&at("m.safetensors"), "2of4"), at("m-2of4.safetensors"));
        assert_eq!(beside(&at("n.safetensors"), "2of4"), at("n-2of4-2.safetensors"));
        assert_eq!(beside(&at("big/"), "2of4"), at("big-2of4"));
        assert_eq!(beside(&at("big/model.safetensors.index.json"), "2of4"), at("big-2of4"));
        assert_eq!(beside(Path::new("owner/name@main"), "2of4"), Path::new("name@main-2of4"));
        assert_eq!(beside(Path::new("."), "compressed"), Path::new("compressed"));
    }

    #[test]
    fn commands_quote_paths() {
        assert_eq!(check(Path::new("my model/")), "twofour check 'my model/'");
        assert_eq!(
            prune(Path::new("no such/my model.safetensors")),
            "twofour prune 'no such/my model.safetensors' -o 'my model-2of4.safetensors'"
        );
    }
}
