//! Choosing tensors of a model.
//!
//! Without `--include`, the chosen tensors are all two-dimensional ones named `weight` or `*.weight`, except three kinds that are not worth pruning,
//! recognized by the parts of their dotted names:
//!
//! | kind | its name has a part that |
//! |---|---|
//! | embedding | contains `embed`, or is `wte`, `wpe` or `shared` |
//! | norm | contains `norm`, is `ln` or `bn`, or begins with `ln_` or `bn_` |
//! | output head | is the last before `weight`, one of `head`, `lm_head`, `output`, `output_projection`, `classifier`, `qa_outputs`, `score`, `proj_out`, `logits`, or is anywhere one of `lm_head`, `predictions`, `vocab_transform`; and no part is a number, so that it is not inside a repeated layer |
//!
//! `--include` replaces these rules of names; `--exclude` removes tensors from either. A `*` matches dots too.

use std::fmt;

use clap::Args;
use globset::{GlobBuilder, GlobMatcher};
use serde::{Serialize, Serializer};
use twofour::file::{Reader, StoredDType};

use crate::exit::Usage;

/// The options that choose tensors.
#[derive(Debug, Clone, Args)]
pub(crate) struct SelectionOptions {
    /// Only tensors whose whole name matches; `*` matches dots too; may be repeated
    ///
    /// Without it: every 2-D `*.weight` except embeddings, norms and the output head.
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,

    /// No tensors whose whole name matches; may be repeated
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
}

/// Why a tensor is not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Skipped {
    /// Its name does not end in `weight`.
    NoWeight,
    /// It does not have two dimensions.
    NoMatrix,
    /// It has no elements.
    Empty,
    /// Its dtype is not one that twofour prunes.
    DType,
    /// It is an embedding.
    Embedding,
    /// It belongs to a norm.
    Norm,
    /// It is the output head.
    Head,
    /// No `--include` matches.
    NotIncluded,
    /// An `--exclude` matches.
    Excluded,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Skipped::NoWeight => "not named *.weight",
            Skipped::NoMatrix => "not 2-D",
            Skipped::Empty => "no elements",
            Skipped::DType => "dtype cannot be pruned",
            Skipped::Embedding => "embedding",
            Skipped::Norm => "norm",
            Skipped::Head => "output head",
            Skipped::NotIncluded => "not in --include",
            Skipped::Excluded => "in --exclude",
        })
    }
}

impl Serialize for Skipped {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The compiled rule.
#[derive(Debug)]
pub(crate) struct Selection {
    include: Vec<GlobMatcher>,
    exclude: Vec<GlobMatcher>,
}

impl SelectionOptions {
    /// Compiles the globs.
    pub(crate) fn selection(&self) -> Result<Selection, Usage> {
        let matchers = |option: &str, globs: &[String]| {
            let matcher = |text: &String| match GlobBuilder::new(text).literal_separator(false).build() {
                Ok(glob) => Ok(glob.compile_matcher()),
                Err(e) => Err(Usage(format!("--{option} {text}: {}", e.kind()))),
            };
            globs.iter().map(matcher).collect::<Result<Vec<_>, _>>()
        };
        Ok(Selection { include: matchers("include", &self.include)?, exclude: matchers("exclude", &self.exclude)? })
    }
}

impl Selection {
    /// Returns whether the tensor is chosen, and if not, why.
    pub(crate) fn of(&self, name: &str, dtype: StoredDType, shape: &[usize]) -> Result<(), Skipped> {
        if self.exclude.iter().any(|glob| glob.is_match(name)) {
            return Err(Skipped::Excluded);
        }
        if !self.include.is_empty() {
            if !self.include.iter().any(|glob| glob.is_match(name)) {
                return Err(Skipped::NotIncluded);
            }
        } else {
            by_name(name)?;
        }
        match shape {
            [_, _] if shape.contains(&0) => Err(Skipped::Empty),
            [_, _] if dtype.element().is_none() => Err(Skipped::DType),
            [_, _] => Ok(()),
            _ => Err(Skipped::NoMatrix),
        }
    }

    /// Returns whether the tensor is a matrix that is an embedding or an output head by its name, and not excluded.
    pub(crate) fn is_head_or_embedding(&self, name: &str, dtype: StoredDType, shape: &[usize]) -> bool {
        let is_excluded = self.exclude.iter().any(|glob| glob.is_match(name));
        let is_matrix = shape.len() == 2 && !shape.contains(&0) && dtype.element().is_some();
        !is_excluded && is_matrix && matches!(by_name(name), Err(Skipped::Embedding | Skipped::Head))
    }

    /// Returns an error for the first glob of either option that matches no tensor: most likely a misspelling.
    pub(crate) fn expect_matches(&self, reader: &Reader) -> Result<(), Usage> {
        let names = || {
            let compressed = reader.compressed_weights().map(|w| w.name.as_str());
            reader.plain_tensors().map(|t| t.name.as_str()).chain(compressed)
        };
        for (option, globs) in [("include", &self.include), ("exclude", &self.exclude)] {
            if let Some(glob) = globs.iter().find(|glob| !names().any(|name| glob.is_match(name))) {
                let examples: Vec<&str> = names().take(3).collect();
                return Err(Usage(format!(
                    "--{option} {} matches none of the {} tensors of {}; their names are like {}",
                    glob.glob(),
                    names().count(),
                    reader.path().display(),
                    examples.join(", ")
                )));
            }
        }
        Ok(())
    }
}

/// The rules of names.
fn by_name(name: &str) -> Result<(), Skipped> {
    let lower = name.to_ascii_lowercase();
    let mut parts: Vec<&str> = lower.split('.').collect();
    if parts.pop() != Some("weight") {
        return Err(Skipped::NoWeight);
    }
    if parts.iter().any(|p| p.contains("embed") || ["wte", "wpe", "shared", "positions"].contains(p)) {
        return Err(Skipped::Embedding);
    }
    let norm =
        |p: &str| p.contains("norm") || ["ln", "bn"].contains(&p) || p.starts_with("ln_") || p.starts_with("bn_");
    if parts.iter().any(|p| norm(p)) {
        return Err(Skipped::Norm);
    }
    const HEADS: [&str; 9] =
        ["head", "lm_head", "output", "output_projection", "classifier", "qa_outputs", "score", "proj_out", "logits"];
    let repeated = parts.iter().any(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()));
    // What comes between the last layer and the scores of tokens: BERT's, RoBERTa's and DistilBERT's.
    const WITHIN: [&str; 3] = ["lm_head", "predictions", "vocab_transform"];
    let is_head = parts.last().is_some_and(|last| HEADS.contains(last)) || parts.iter().any(|p| WITHIN.contains(p));
    if is_head && !repeated { Err(Skipped::Head) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(include: &[&str], exclude: &[&str]) -> Selection {
        let owned = |globs: &[&str]| globs.iter().map(ToString::to_string).collect();
        SelectionOptions { include: owned(include), exclude: owned(exclude) }.selection().unwrap()
    }

    #[test]
    fn names_of_well_known_models_are_told_apart() {
        use Skipped::*;
        for (name, expected) in [
            ("model.layers.0.self_attn.q_proj.weight", Ok(())),
            ("model.layers.31.mlp.down_proj.weight", Ok(())),
            ("model.embed_tokens.weight", Err(Embedding)),
            ("model.layers.0.input_layernorm.weight", Err(Norm)),
            ("model.norm.weight", Err(Norm)),
            ("lm_head.weight", Err(Head)),
            ("model.layers.0.self_attn.q_proj.bias", Err(NoWeight)),
            // GPT-2, BERT, the original Llama, T5 and this project's GPT.
            ("transformer.h.0.attn.c_attn.weight", Ok(())),
            ("transformer.wte.weight", Err(Embedding)),
            ("h.0.ln_1.weight", Err(Norm)),
            ("bert.encoder.layer.0.attention.output.dense.weight", Ok(())),
            ("encoder.layers.3.output.weight", Ok(())),
            ("output.weight", Err(Head)),
            ("shared.weight", Err(Embedding)),
            ("blocks.2.mlp.up.weight", Ok(())),
            ("head.weight", Err(Head)),
            ("qa_outputs.weight", Err(Head)),
            ("cls.predictions.transform.dense.weight", Err(Head)),
            ("lm_head.dense.weight", Err(Head)),
            ("weight", Ok(())),
            ("weights", Err(NoWeight)),
        ] {
            assert_eq!(by_name(name), expected, "{name}");
        }
    }

    #[test]
    fn include_overrides_the_names_but_not_the_shape() {
        let s = options(&["*embed*", "x"], &["*.2.*"]);
        assert_eq!(s.of("embed.weight", StoredDType::F32, &[4, 4]), Ok(()));
        assert_eq!(s.of("x", StoredDType::F32, &[4]), Err(Skipped::NoMatrix));
        assert_eq!(s.of("x", StoredDType::F32, &[0, 4]), Err(Skipped::Empty));
        assert_eq!(s.of("x", StoredDType::I64, &[4, 4]), Err(Skipped::DType));
        assert_eq!(s.of("y", StoredDType::F32, &[4, 4]), Err(Skipped::NotIncluded));
        assert_eq!(s.of("embed.2.w", StoredDType::F32, &[4, 4]), Err(Skipped::Excluded));
    }

    #[test]
    fn a_bad_glob_is_named() {
        let bad = SelectionOptions { include: vec!["[a".to_owned()], exclude: vec![] };
        let message = bad.selection().unwrap_err().to_string();
        assert!(message.contains("--include [a"), "{message}");
    }
}
