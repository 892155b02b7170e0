//! Families of models: what the fields of `config.json` mean, and how tensors are named. A family is a file here, and
//! its line in `families!`.

pub(super) mod fields;
pub(crate) mod layout;

use twofour::file::Reader;

use self::{fields::Fields, layout::Layout};
use super::{CheckpointError, TransformerConfig};

/// The files of families.
macro_rules! families {
    ($($visibility:vis $file:ident,)*) => {
        $($visibility mod $file;)*

        /// All families.
        const FAMILIES: &[&[Family]] = &[$($file::FAMILIES,)*];
    };
}

families! {
    pub(super) llama,
    mixtral,
    gpt_oss,
    deepseek,
    granite,
    smollm3,
    stablelm,
    starcoder2,
    phi2,
    phi,
    gpt2,
    gemma,
    opt,
    gpt_neox,
    falcon,
    bloom,
    mpt,
    vision_language,
    pub(crate) bert,
    vit,
    sam,
}

/// How directories of one `model_type` are read.
#[derive(Debug)]
pub(super) struct Family {
    /// The `model_type`.
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// The field with the number of layers.
    pub(super) layers: &'static str,
    /// What the names of a model's tensors may begin with; nothing where it was stored without its head's class.
    prefixes: &'static [&'static str],
    /// The fields with the sizes of blocks, where blocks can be made smaller.
    pub(super) sizes: Option<SizeFields>,
    /// Reads the description, and refuses fields that change what the model computes and are not computed.
    pub(super) config: fn(&Source<'_>) -> Result<TransformerConfig, CheckpointError>,
    /// Where the tensors lie.
    pub(super) layout: fn(&Source<'_>, &TransformerConfig) -> crate::Result<Layout>,
}

/// The fields of a family's `config.json` that have the sizes of its blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct SizeFields {
    /// Hidden features of the feed-forward block.
    pub(super) features: &'static str,
    /// Heads, heads of keys and values, and elements of a head; none where a head has `width / heads` elements.
    pub(super) heads: Option<[&'static str; 3]>,
    /// Whether transformers refuses a number of heads that does not divide the width.
    pub(super) divides_width: bool,
}

impl SizeFields {
    /// LLaMA's names, for any number of heads.
    const LLAMA: Self = SizeFields {
        features: "intermediate_size",
        heads: Some(["num_attention_heads", "num_key_value_heads", "head_dim"]),
        divides_width: false,
    };

    /// The fields of a family whose heads have no size of their own.
    const fn features(features: &'static str) -> Self {
        SizeFields { features, heads: None, divides_width: false }
    }
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
    /// All families.
    pub(super) fn all() -> impl Iterator<Item = &'static Self> {
        FAMILIES.iter().copied().flatten()
    }

    /// The family of a `model_type`.
    pub(super) fn named(name: &str) -> Option<&'static Self> {
        Self::all().find(|family| family.name == name)
    }

    /// The names of the families of these kinds, as a list.
    pub(super) fn names(kinds: &[Kind]) -> String {
        let of_kinds = Self::all().filter(|family| kinds.contains(&family.kind));
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
