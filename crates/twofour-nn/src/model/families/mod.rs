//! Families of models: what the fields of `config.json` mean, and how tensors are named. A family is a file here, and
//! its line in [`FAMILIES`].

pub(crate) mod bert;
mod bloom;
mod deepseek;
mod falcon;
pub(super) mod fields;
mod gemma;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
pub(crate) mod layout;
pub(super) mod llama;
mod mixtral;
mod mpt;
mod opt;
mod phi;
mod phi2;
mod sam;
mod smollm3;
mod stablelm;
mod starcoder2;
mod vision_language;
mod vit;

use twofour::file::Reader;

use self::{fields::Fields, layout::Layout};
use super::{CheckpointError, TransformerConfig};

/// All families.
const FAMILIES: &[&[Family]] = &[
    llama::FAMILIES,
    mixtral::FAMILIES,
    gpt_oss::FAMILIES,
    deepseek::FAMILIES,
    granite::FAMILIES,
    smollm3::FAMILIES,
    stablelm::FAMILIES,
    starcoder2::FAMILIES,
    phi2::FAMILIES,
    phi::FAMILIES,
    gpt2::FAMILIES,
    gemma::FAMILIES,
    opt::FAMILIES,
    gpt_neox::FAMILIES,
    falcon::FAMILIES,
    bloom::FAMILIES,
    mpt::FAMILIES,
    vision_language::FAMILIES,
    bert::FAMILIES,
    vit::FAMILIES,
    sam::FAMILIES,
];

/// How directories of one `model_type` are read.
#[derive(Debug)]
pub(super) struct Family {
    /// The `model_type`.
    name: &'static str,
    pub(super) kind: Kind,
    /// The field with the number of layers.
    pub(super) layers: &'static str,
    /// What the names of a model's tensors may begin with; nothing where it was stored without its head's class.
    prefixes: &'static [&'static str],
    /// Reads the description, and refuses fields that change what the model computes and are not computed.
    pub(super) config: fn(&Source<'_>) -> Result<TransformerConfig, CheckpointError>,
    /// Where the tensors lie.
    pub(super) layout: fn(&Source<'_>, &TransformerConfig) -> crate::Result<Layout>,
}

/// What a model is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text, token by token.
    Decoder,
    /// Hidden states of texts.
    Encoder,
    /// Hidden states of images.
    Image,
}

/// What a family reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) fields: &'a Fields,
    pub(super) reader: &'a Reader,
    /// What the names of the model's tensors begin with.
    prefix: &'static str,
}

impl Family {
    /// The family of a `model_type`.
    pub(super) fn named(name: &str) -> Option<&'static Self> {
        FAMILIES.iter().copied().flatten().find(|family| family.name == name)
    }

    /// The names of the families of these kinds, as a list.
    pub(super) fn names(kinds: &[Kind]) -> String {
        let of_kinds = FAMILIES.iter().copied().flatten().filter(|family| kinds.contains(&family.kind));
        let names: Vec<_> = of_kinds.map(|family| family.name).collect();
        match names.split_last() {
            Some((last, others)) if !others.is_empty() => format!("{} and {last}", others.join(", ")),
            _ => names.concat(),
        }
    }
}

impl<'a> Source<'a> {
    pub(super) fn new(family: &Family, fields: &'a Fields, reader: &'a Reader) -> Self {
        let is_there = |prefix: &&&'static str| reader.tensors().any(|tensor| tensor.name.starts_with(**prefix));
        let prefix = family.prefixes.iter().find(is_there).copied().unwrap_or_default();
        Source { fields, reader, prefix }
    }

    /// The shape of a tensor, plain or compressed; none where it is not stored.
    fn shape_of(&self, name: &str) -> Option<Vec<usize>> {
        let plain = || self.reader.tensor(name).ok().map(|view| view.info.shape.clone());
        self.reader.compressed_info(name).ok().map(|info| vec![info.rows, info.cols]).or_else(plain)
    }
}
