//! Hard threshold with the straight-through estimator.

use super::{Method, TrainingMethod};

pub(super) const METHOD: Method = Method { name: "ste", method: &Ste };

struct Ste;

impl TrainingMethod for Ste {
    fn has(&self) -> &'static [&'static str] {
        &["two_of_four_from"]
    }
}
