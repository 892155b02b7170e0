//! Choosing tensors of a model.
//!
//! Without `--include` the chosen tensors are those that the library finds to be weights of linear layers
//! or convolutions ([`twofour::role`]). `--include` replaces that choice; `--exclude` removes tensors from either. A
//! `*` matches dots too.

use std::{collections::BTreeSet, fmt};

use anyhow::{Result, bail};
use clap::Args;
use globset::{GlobBuilder, GlobMatcher};
use serde::{Serialize, Serializer};
use twofour::{
    file::{Reader, Stack, StoredDType, TensorInfo},
    role::{Layout, Role, Roles},
};

use crate::{exit::Usage, present::units};

/// The options that choose tensors.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct SelectionOptions {
    /// Only tensors whose whole name matches; `*` matches dots too; may be repeated
    ///
    /// Without it: the weights of linear layers and convolutions inside the repeated layers of the model. Embeddings,
    /// norms, heads, projectors, routers of experts, what sets the decay of recurrences, and depthwise and transposed
    /// convolutions are left out.
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,

    /// No tensors whose whole name matches; may be repeated
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
}

/// Why a tensor is not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Skipped {
    /// It is no linear layer's weight.
    Role(Role),
    /// It has no elements.
    Empty,
    /// Its dtype is not one that twofour prunes.
    DType(StoredDType),
    /// It is stored as `[in, out]`, and compressed weights are 2:4 along stored rows.
    InOut,
    /// It holds experts in three dimensions, and nothing tells along which of them they are summed.
    UnknownAxis,
    /// It holds experts in three dimensions, which are compressed one by one in twofour's own format alone.
    Stacked,
    /// It is a convolution's, and compressed weights are matrices.
    Convolution,
    /// No `--include` matches.
    NotIncluded,
    /// An `--exclude` matches.
    Excluded,
    /// A plan has it as dense, or not at all.
    NotInPlan,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Skipped::Role(role) => role.fmt(f),
            Skipped::Empty => f.write_str("no elements"),
            Skipped::DType(dtype) => write!(f, "{dtype} cannot be pruned; store it as F32, F16 or BF16"),
            Skipped::InOut => f.write_str("stored as [in, out]; compressed weights are [out, in]"),
            Skipped::UnknownAxis => {
                f.write_str("experts in one 3-D tensor, [out, in] or [in, out]: nothing tells which")
            }
            Skipped::Stacked => f.write_str("experts in one 3-D tensor, which other tools' formats do not hold packed"),
            Skipped::Convolution => f.write_str("a convolution; compressed weights are matrices"),
            Skipped::NotIncluded => f.write_str("not in --include"),
            Skipped::Excluded => f.write_str("in --exclude"),
            Skipped::NotInPlan => f.write_str("not sparse in --plan"),
        }
    }
}

impl Serialize for Skipped {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The options, compiled.
#[derive(Debug)]
pub(crate) struct Globs {
    include: Vec<GlobMatcher>,
    exclude: Vec<GlobMatcher>,
    /// The names of a plan, where there is one.
    only: Option<BTreeSet<String>>,
}

impl SelectionOptions {
    /// Compiles the globs.
    pub(crate) fn globs(&self) -> Result<Globs, Usage> {
        let matchers = |option: &str, globs: &[String]| {
            let matcher = |text: &String| match GlobBuilder::new(text).literal_separator(false).build() {
                Ok(glob) => Ok(glob.compile_matcher()),
                Err(e) => Err(Usage(format!("--{option} {text}: {}", e.kind()))),
            };
            globs.iter().map(matcher).collect::<Result<Vec<_>, _>>()
        };
        Ok(Globs {
            include: matchers("include", &self.include)?,
            exclude: matchers("exclude", &self.exclude)?,
            only: None,
        })
    }
}

impl Globs {
    /// Leaves out tensors of other names.
    pub(crate) fn only(self, names: BTreeSet<String>) -> Self {
        Globs { only: Some(names), ..self }
    }

    /// The choice among a model's tensors; an error for the first glob that matches none: most likely a misspelling.
    pub(crate) fn of_model(self, reader: &Reader) -> Result<Selection> {
        let names = || {
            let compressed = reader.compressed_weights().map(|w| w.name.as_str());
            reader.plain_tensors().map(|t| t.name.as_str()).chain(compressed)
        };
        for (option, globs) in [("include", &self.include), ("exclude", &self.exclude)] {
            if let Some(glob) = globs.iter().find(|glob| !names().any(|name| glob.is_match(name))) {
                let examples: Vec<&str> = names().take(3).collect();
                let usage = Usage(format!(
                    "--{option} {} matches none of the {} tensors of {}; their names are like {}",
                    glob.glob(),
                    names().count(),
                    reader.path().display(),
                    examples.join(", ")
                ));
                return Err(usage.into());
            }
        }
        let missing = self.only.iter().flatten().find(|name| !names().any(|own| own == name.as_str()));
        if let Some(missing) = missing {
            let usage = Usage(format!(
                "--plan: there is no tensor `{missing}` in {}; make the plan for this model",
                reader.path().display()
            ));
            return Err(usage.into());
        }
        let selection = Selection { globs: self, roles: Roles::of_model(reader)?, stacks: vec![] };
        selection.expect_weights(reader)?;
        Ok(selection)
    }
}

/// A choice among a model's tensors.
#[derive(Debug)]
pub(crate) struct Selection {
    globs: Globs,
    roles: Roles,
    /// Chosen tensors of experts whose matrices are tensors of their own.
    stacks: Vec<Stack>,
}

impl Selection {
    /// Returns the model with the chosen experts in tensors of three dimensions taken apart; the choice of these
    /// tensors is that of their matrices from now on.
    pub(crate) fn unstack(&mut self, reader: Reader) -> Result<Reader> {
        let before = reader.stacks().len();
        let reader = reader.unstacked(|tensor| self.of(&tensor.name, tensor.dtype, &tensor.shape).is_ok())?;
        if reader.stacks().len() > before {
            self.stacks = reader.stacks().to_vec();
        }
        Ok(reader)
    }

    /// Returns how the chosen weight is stored, or why the tensor is not chosen.
    pub(crate) fn of(&self, name: &str, dtype: StoredDType, shape: &[usize]) -> Result<Layout, Skipped> {
        if let Some(stack) = self.stacks.iter().find(|stack| stack.number_of(name).is_some()) {
            return self.of(&stack.name, dtype, &stack.shape).map(|_| Layout::OutIn);
        }
        if self.globs.exclude.iter().any(|glob| glob.is_match(name)) {
            return Err(Skipped::Excluded);
        }
        if self.globs.only.as_ref().is_some_and(|names| !names.contains(name)) {
            return Err(Skipped::NotInPlan);
        }
        if self.globs.include.is_empty() {
            let role = self.roles.of(name, shape);
            if !role.is_worth_pruning() {
                return Err(Skipped::Role(role));
            }
        } else if !self.globs.include.iter().any(|glob| glob.is_match(name)) {
            return Err(Skipped::NotIncluded);
        }
        match self.roles.layout(name, shape) {
            _ if shape.contains(&0) => Err(Skipped::Empty),
            None => Err(match self.roles.of(name, shape) {
                Role::StackedExperts => Skipped::UnknownAxis,
                role @ Role::Upsampling => Skipped::Role(role),
                _ => Skipped::Role(Role::NotAMatrix),
            }),
            Some(_) if dtype.element().is_none() => Err(Skipped::DType(dtype)),
            Some(layout) => Ok(layout),
        }
    }

    /// Returns whether the tensor is chosen and can be stored compressed, which is along rows of `[out, in]`; if not,
    /// why.
    pub(crate) fn of_compressible(&self, name: &str, dtype: StoredDType, shape: &[usize]) -> Result<(), Skipped> {
        match self.of(name, dtype, shape)? {
            Layout::Convolution => Err(Skipped::Convolution),
            _ if shape.len() > 2 => Err(Skipped::Stacked),
            Layout::OutIn => Ok(()),
            Layout::InOut => Err(Skipped::InOut),
        }
    }

    /// Returns an error where no weight is chosen because another tool packed them, or because of their type.
    fn expect_weights(&self, reader: &Reader) -> Result<()> {
        let chosen = |t: &TensorInfo| self.of(&t.name, t.dtype, &t.shape);
        if reader.compressed_weights().next().is_some() || reader.plain_tensors().any(|t| chosen(t).is_ok()) {
            return Ok(());
        }
        let path = reader.path().display();
        if let Some(packed) = reader.foreign_packed() {
            bail!(
                "{path}: another tool packed the weights (`{}`); twofour convert writes those formats dense that it \
                 reads, or start from the model that was quantized, in f32, f16 or bf16",
                packed.name
            );
        }
        let adapters = reader.plain_tensors().filter(|t| chosen(t) == Err(Skipped::Role(Role::Adapter))).count();
        if adapters > 0 {
            bail!(
                "{path}: an adapter, which changes the weights of a model; merge it into its model, as twofour merge \
                 does"
            );
        }
        match reader.plain_tensors().find_map(|t| match chosen(t) {
            Err(Skipped::DType(dtype)) => Some((t, dtype)),
            _ => None,
        }) {
            Some((tensor, dtype)) => {
                bail!(
                    "{path}: tensor `{}` is {dtype}, which cannot be pruned; store the model in F32, F16 or BF16",
                    tensor.name
                )
            }
            None => Ok(()),
        }
    }

    /// Returns an error where no weight is chosen that could be stored compressed: the output would be a copy of the
    /// model.
    pub(crate) fn expect_compressible(&self, reader: &Reader) -> Result<()> {
        let skipped: Vec<Skipped> =
            reader.plain_tensors().filter_map(|t| self.of_compressible(&t.name, t.dtype, &t.shape).err()).collect();
        let has_others = reader.compressed_weights().next().is_some() || reader.plain_tensors().count() > skipped.len();
        if !has_others && skipped.contains(&Skipped::Convolution) {
            bail!(
                "{}: no linear layer is chosen, and weights of convolutions are not stored compressed; `prune` and \
                 `check` work with them, and PyTorch layers of the Python package hold them compressed in memory",
                reader.path().display()
            );
        }
        let in_out = skipped.iter().filter(|reason| **reason == Skipped::InOut).count();
        if !has_others && in_out > 0 {
            bail!(
                "{}: {} of linear layers are stored as [in_features, out_features], and compressed weights are 2:4 \
                 along the rows of \
                 [out_features, in_features]; nothing is left to do: `prune` and `generate` work with such a model as \
                 it is",
                reader.path().display(),
                units::plural(in_out, "weight")
            );
        }
        Ok(())
    }

    /// Returns whether the tensor is a matrix that is an embedding or an output head, and not excluded.
    pub(crate) fn is_head_or_embedding(&self, name: &str, dtype: StoredDType, shape: &[usize]) -> bool {
        let is_excluded = self.globs.exclude.iter().any(|glob| glob.is_match(name));
        let is_matrix = shape.len() == 2 && !shape.contains(&0) && dtype.element().is_some();
        !is_excluded && is_matrix && matches!(self.roles.of(name, shape), Role::Embedding | Role::Head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(include: &[&str], exclude: &[&str], tensors: &[(&str, &[usize])]) -> Selection {
        let owned = |globs: &[&str]| globs.iter().map(ToString::to_string).collect();
        let globs = SelectionOptions { include: owned(include), exclude: owned(exclude) }.globs().unwrap();
        Selection { globs, roles: Roles::new(tensors.iter().copied(), false), stacks: vec![] }
    }

    #[test]
    fn include_overrides_the_role_but_not_the_shape() {
        let s = selection(&["*embed*", "x"], &["*.2.*"], &[]);
        assert_eq!(s.of("embed.weight", StoredDType::F32, &[4, 4]), Ok(Layout::OutIn));
        assert_eq!(s.of("x", StoredDType::F32, &[4]), Err(Skipped::Role(Role::NotAMatrix)));
        assert_eq!(s.of("x", StoredDType::F32, &[0, 4]), Err(Skipped::Empty));
        assert_eq!(s.of("x", StoredDType::I64, &[4, 4]), Err(Skipped::DType(StoredDType::I64)));
        assert_eq!(s.of("y", StoredDType::F32, &[4, 4]), Err(Skipped::NotIncluded));
        assert_eq!(s.of("embed.2.w", StoredDType::F32, &[4, 4]), Err(Skipped::Excluded));
    }

    #[test]
    fn a_weight_that_is_stored_in_out_is_chosen_and_not_compressible_even_where_it_is_included() {
        let tensors: [(&str, &[usize]); 2] = [("h.0.mlp.c_fc.weight", &[8, 32]), ("h.0.mlp.c_fc.bias", &[32])];
        for include in [&[][..], &["*c_fc.weight"]] {
            let s = selection(include, &[], &tensors);
            assert_eq!(s.of(tensors[0].0, StoredDType::F32, &[8, 32]), Ok(Layout::InOut));
            assert_eq!(s.of_compressible(tensors[0].0, StoredDType::F32, &[8, 32]), Err(Skipped::InOut));
        }
    }

    #[test]
    fn heads_and_tables_are_known_by_their_shape_where_no_name_tells() {
        let tensors: [(&str, &[usize]); 4] = [
            ("transformer.embedding.word_embeddings.weight", &[96, 16]),
            ("transformer.layers.0.mlp.up.weight", &[96, 16]),
            ("transformer.output_layer.weight", &[96, 16]),
            ("projector.weight", &[16, 16]),
        ];
        let s = selection(&[], &[], &tensors);
        let found = tensors.map(|(name, shape)| s.is_head_or_embedding(name, StoredDType::F32, shape));
        assert_eq!(found, [true, false, true, false]);
        let excluded = selection(&[], &["*output*"], &tensors);
        assert!(!excluded.is_head_or_embedding(tensors[2].0, StoredDType::F32, tensors[2].1));
    }

    #[test]
    fn a_bad_glob_is_named() {
        let bad = SelectionOptions { include: vec!["[a".to_owned()], exclude: vec![] };
        let message = bad.globs().unwrap_err().to_string();
        assert!(message.contains("--include [a"), "{message}");
    }
}
