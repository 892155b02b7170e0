//! The sections of a recipe's text while they are read and checked.

use std::path::{Path, PathBuf};

use super::{Mistakes, Place, data::tenth};
use crate::settings::{Range, Section};

/// The keys of a model that only a vision transformer has.
pub(super) const VISION_KEYS: [&str; 5] = ["image", "patch", "channels", "classes", "pooling"];

const VALIDATION: Range = Range { words: "a share above 0 and at most 0.5", holds: |x| x > 0.0 && x <= 0.5 };

/// The sections while they are read and checked.
pub(super) struct Sections<'a> {
    pub(super) model: Section<'a>,
    pub(super) data: Section<'a>,
    pub(super) training: Section<'a>,
    pub(super) sparsity: Section<'a>,
    pub(super) distillation: Section<'a>,
    /// `[sparsity.sparsifier]`.
    pub(super) sparsifier: Section<'a>,
    /// The sections `[[sparsity.override]]`, in order.
    pub(super) overrides: Vec<Section<'a>>,
    /// `[sparsity.override.sparsifier]` of each.
    pub(super) override_sparsifiers: Vec<Section<'a>>,
}

/// Notes keys that the recipe's kind of model does not have.
pub(super) fn refuse(s: &mut Section<'_>, section: &str, keys: &[&'static str], why: &str, m: &mut Mistakes) {
    for key in keys {
        if s.skip(key) {
            m.add(s.place(key), format!("{section}.{key}"), why);
        }
    }
}

/// A path of a recipe, which is relative to it, or of an override, which is not.
pub(super) fn path_of(text: &str, place: &Place, folder: &Path) -> PathBuf {
    match place {
        Place::Override => text.into(),
        _ => folder.join(text),
    }
}

/// A list of files that must be there, with the place of each.
pub(super) fn read_files(
    s: &mut Section<'_>,
    key: &'static str,
    what: &str,
    folder: &Path,
    m: &mut Mistakes,
) -> (Vec<PathBuf>, Vec<Place>) {
    let files = s.texts(key, m);
    let files = s.required(key, what, files, Vec::new(), m);
    files.into_iter().map(|(file, place)| (path_of(&file, &place, folder), place)).unzip()
}

/// The share for validation.
pub(super) fn read_validation(s: &mut Section<'_>, m: &mut Mistakes) -> f64 {
    s.number("validation", VALIDATION, m).unwrap_or_else(tenth)
}
