//! Names of the files of a model's directory that holds packed weights.
//!
//! transformers reads `model.safetensors` and knows nothing of packed weights: it would initialize the layers at
//! random. So in a directory these files have names that it does not look for.

/// What stands before the ordinary name of a file of weights, or of an index, in a directory that holds packed weights.
pub const PACKED_PREFIX: &str = "twofour-";

/// The file that says what a directory of packed weights is.
pub const PACKED_README: &str = "README-twofour.md";

/// The end of an index's file name.
pub(super) const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// The end of a file name of weights.
pub(super) const WEIGHTS_SUFFIX: &str = ".safetensors";

/// The files of a model that transformers wrote with `torch.save`: its index, and the one file.
pub(super) const PYTORCH: [&str; 2] = ["pytorch_model.bin.index.json", "pytorch_model.bin"];

/// The usual name of a model's one file of weights.
pub(super) const WEIGHTS_FILE: &str = "model.safetensors";

/// The text of [`PACKED_README`].
pub(super) const README_TEXT: &str = "\
# 2:4 weights of twofour

The files `twofour-*.safetensors` of this directory hold weights in twofour's packed 2:4 format. Their names are such \
that transformers alone finds no
weights here, instead of layers that it would initialize at random.

- Python: `pip install twofour`, then `import twofour.transformers` before `from_pretrained`.
- The command: `twofour eval DIR`, `twofour generate DIR`, `twofour check DIR`.
- An ordinary checkpoint, dense with zeros: `twofour decompress DIR -o OUT`.
";

/// The ordinary name of a file of weights or of an index, whether or not it holds packed weights.
pub(super) fn ordinary(name: &str) -> &str {
    name.strip_prefix(PACKED_PREFIX).unwrap_or(name)
}

/// The name of that file in a directory that holds packed weights.
pub(super) fn packed(name: &str) -> String {
    format!("{PACKED_PREFIX}{}", ordinary(name))
}

/// The name of that file in a directory that holds packed weights, or none.
pub(super) fn named(name: &str, is_packed: bool) -> String {
    if is_packed { packed(name) } else { ordinary(name).to_owned() }
}

/// Whether a file of this name holds weights, or is an index of such.
pub(super) fn is_of_weights(name: &str) -> bool {
    name.ends_with(WEIGHTS_SUFFIX) || name.ends_with(INDEX_SUFFIX) || is_index_of_variant(name)
}

/// Whether a file of this name is an index of a variant, as in `model.safetensors.index.fp16.json`.
fn is_index_of_variant(name: &str) -> bool {
    name.strip_suffix(".json")
        .and_then(|rest| rest.rsplit_once('.'))
        .is_some_and(|(rest, _)| rest.ends_with(".safetensors.index"))
}

/// What a file of weights in a model's directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A model, or a shard of one.
    Model,
    /// Changes of a model's weights, in a format of peft.
    Adapter,
    /// The weights of a model in the format and under the names of its authors.
    Consolidated,
    /// The weights of a model in another type, as in `model.fp16.safetensors`.
    Variant,
}

impl Kind {
    /// What a file of that name is among all names of its directory.
    pub(super) fn of(name: &str, all: &[String]) -> Self {
        if name.starts_with("adapter_model") {
            Kind::Adapter
        } else if name.starts_with("consolidated") {
            Kind::Consolidated
        } else if is_variant(name, all) {
            Kind::Variant
        } else {
            Kind::Model
        }
    }
}

/// Whether a name is another one of its directory with a word before a dot added, as `fp16` in
/// `model.fp16.safetensors`.
fn is_variant(name: &str, all: &[String]) -> bool {
    if is_index_of_variant(name) {
        return true;
    }
    // Shards: model.fp16-00001-of-00002.safetensors, model-00001-of-00002.fp16.safetensors.
    let stem = name.strip_suffix(INDEX_SUFFIX).or_else(|| name.strip_suffix(WEIGHTS_SUFFIX)).unwrap_or(name);
    let stem = stem.split_once("-000").map_or(stem.to_owned(), |(first, shard)| match shard.split_once('.') {
        Some((_, word)) => format!("{first}.{word}"),
        None => first.to_owned(),
    });
    let Some((base, word)) = stem.rsplit_once('.') else { return false };
    let is_word = !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let whole = |other: &String| {
        let other = ordinary(other);
        let rest = other.strip_prefix(ordinary(base)).unwrap_or_default();
        rest == WEIGHTS_SUFFIX
            || rest == INDEX_SUFFIX
            || rest.starts_with("-000") && !rest.trim_end_matches(WEIGHTS_SUFFIX).contains('.')
    };
    is_word && !base.is_empty() && all.iter().any(whole)
}

/// The name of a file in safetensors that has this one's place in another directory: of weights in any format, or of an
/// index.
pub(super) fn in_safetensors(name: &str) -> String {
    if name.ends_with(WEIGHTS_SUFFIX) || name.ends_with(INDEX_SUFFIX) {
        return name.to_owned();
    }
    let model = name.strip_prefix("pytorch_").unwrap_or(name);
    match (model.strip_suffix(".bin.index.json"), model.strip_suffix(".bin")) {
        (Some(stem), _) => format!("{stem}{INDEX_SUFFIX}"),
        (None, Some(stem)) if shards_of(&format!("{stem}{WEIGHTS_SUFFIX}")).is_some() => {
            format!("{stem}{WEIGHTS_SUFFIX}")
        }
        _ => WEIGHTS_FILE.to_owned(),
    }
}

/// The number of shards that a name tells, as in `model-00002-of-00004.safetensors`.
pub(super) fn shards_of(name: &str) -> Option<u32> {
    let (rest, count) = name.strip_suffix(WEIGHTS_SUFFIX)?.rsplit_once("-of-")?;
    let (_, number) = rest.rsplit_once('-')?;
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(number) && is_number(count)).then(|| count.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_packed_and_ordinary_again() {
        for name in ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"] {
            assert_eq!(packed(name), format!("twofour-{name}"));
            assert_eq!((packed(&packed(name)), ordinary(&packed(name)), ordinary(name)), (packed(name), name, name));
            assert!(is_of_weights(name) && is_of_weights(&packed(name)));
        }
        assert!(!is_of_weights("config.json") && !is_of_weights("tokenizer.json"));
    }

    #[test]
    fn files_of_other_formats_become_safetensors() {
        for (name, expected) in [
            ("model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors"),
            ("pytorch_model.bin", "model.safetensors"),
            ("pytorch_model-00002-of-00003.bin", "model-00002-of-00003.safetensors"),
            ("pytorch_model.bin.index.json", "model.safetensors.index.json"),
            ("model.safetensors.index.json", "model.safetensors.index.json"),
            ("qwen-q8_0.gguf", "model.safetensors"),
            ("epoch=3.ckpt", "model.safetensors"),
        ] {
            assert_eq!(in_safetensors(name), expected);
        }
    }

    #[test]
    fn a_variant_is_one_beside_what_it_varies() {
        let all = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let one = all(&["model.safetensors"]);
        for (name, beside, expected) in [
            ("model.safetensors", &one, Kind::Model),
            ("model.fp16.safetensors", &one, Kind::Variant),
            ("model.fp16.safetensors", &all(&["twofour-model.safetensors"]), Kind::Variant),
            ("model.fp16.safetensors", &all(&["other.safetensors"]), Kind::Model),
            ("model.safetensors.index.fp16.json", &all(&["model.safetensors.index.json"]), Kind::Variant),
            ("model.fp16-00001-of-00002.safetensors", &all(&["model-00001-of-00002.safetensors"]), Kind::Variant),
            ("model-00001-of-00002.fp16.safetensors", &all(&["model.safetensors.index.json"]), Kind::Variant),
            ("model-00001-of-00002.safetensors", &all(&["model.safetensors.index.json"]), Kind::Model),
            ("llama.v1.2.safetensors", &one, Kind::Model),
            ("adapter_model.safetensors", &one, Kind::Adapter),
            ("consolidated.safetensors", &one, Kind::Consolidated),
            ("consolidated-00001-of-00002.safetensors", &one, Kind::Consolidated),
        ] {
            assert_eq!(Kind::of(name, beside), expected, "{name} beside {beside:?}");
        }
        assert_eq!(shards_of("model-00002-of-00004.safetensors"), Some(4));
        assert_eq!(shards_of("model.safetensors"), None);
    }
}
