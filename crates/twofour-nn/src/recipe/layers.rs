//! Which linear layers become 2:4, and why the others do not.

use globset::Glob;
use serde::Serialize;
use twofour::layer::MaskRule;

use super::{Method, Mistakes, Recipe, near::near, reader::Section, resolve::mask_of};
use crate::model::DecoderConfig;

/// The layers that are 2:4 where a recipe names none: those of feed-forward blocks.
const FEED_FORWARD: &str = "blocks.*.mlp.*";

/// A linear layer and its form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerPlan {
    /// The name.
    pub name: String,
    /// Output features.
    pub out_features: usize,
    /// Input features.
    pub in_features: usize,
    /// Whether it is 2:4 while layers are.
    pub sparse: bool,
    /// Why, or why not; empty where nothing is to be said.
    pub reason: String,
}

impl LayerPlan {
    /// Number of weights.
    pub fn weights(&self) -> usize {
        self.out_features * self.in_features
    }
}

impl Recipe {
    /// The linear layers of the model, in the order of computation.
    pub fn layers(&self) -> Vec<LayerPlan> {
        let settings = &self.sparsity;
        let default = [FEED_FORWARD.to_owned()];
        let patterns = settings.layers.as_deref().unwrap_or(&default);
        let globs: Vec<_> = patterns.iter().filter_map(|p| Glob::new(p).ok()).map(|g| g.compile_matcher()).collect();
        let transposable = matches!(mask_of(settings), MaskRule::Transposable(_));
        let plan = |(name, out_features, in_features): (String, usize, usize)| {
            let chosen = settings.method != Method::Dense && globs.iter().any(|glob| glob.is_match(&name));
            let reason = if chosen {
                padding(out_features, in_features, transposable)
            } else if settings.method == Method::Dense {
                "the method is dense".to_owned()
            } else if settings.layers.is_some() {
                "no pattern of sparsity.layers matches it".to_owned()
            } else {
                "not in a feed-forward block; name it in sparsity.layers".to_owned()
            };
            LayerPlan { name, out_features, in_features, sparse: chosen, reason }
        };
        DecoderConfig::from(&self.model).linear_layers().into_iter().map(plan).collect()
    }
}

/// What a shape costs that is not cut into whole groups or tiles.
fn padding(out_features: usize, in_features: usize, transposable: bool) -> String {
    let mut parts = Vec::new();
    if !in_features.is_multiple_of(4) {
        parts.push(format!("in_features padded from {in_features} to {}", in_features.next_multiple_of(4)));
    }
    if transposable && !out_features.is_multiple_of(4) {
        parts.push(format!("out_features padded from {out_features} to {}", out_features.next_multiple_of(4)));
    }
    parts.join(", ")
}

/// Notes patterns that are malformed or match no linear layer, with the closest names.
pub(super) fn check(recipe: &Recipe, section: &Section<'_>, m: &mut Mistakes) {
    let Some(patterns) = &recipe.sparsity.layers else { return };
    if m.has("sparsity.layers") {
        return;
    }
    if patterns.is_empty() {
        m.add(
            section.place("layers"),
            "sparsity.layers",
            "found an empty list; for no 2:4 layer use the method \"dense\"",
        );
    }
    let names: Vec<String> =
        DecoderConfig::from(&recipe.model).linear_layers().into_iter().map(|(name, ..)| name).collect();
    for pattern in patterns {
        match Glob::new(pattern) {
            Err(error) => {
                m.add(section.place("layers"), "sparsity.layers", format!("{pattern:?}: {}", error.kind()));
            }
            Ok(glob) => {
                let matcher = glob.compile_matcher();
                if !names.iter().any(|name| matcher.is_match(name)) {
                    let problem = format!("{pattern:?} matches no linear layer; {}", closest(pattern, &names));
                    m.add(section.place("layers"), "sparsity.layers", problem);
                }
            }
        }
    }
}

/// The closest names to a pattern, with the number of the block as the pattern has it.
fn closest(pattern: &str, names: &[String]) -> String {
    let any_block = |name: &str| {
        let parts = name.split('.').map(|part| if part.parse::<usize>().is_ok() { "*" } else { part });
        parts.collect::<Vec<_>>().join(".")
    };
    let mut forms: Vec<String> = names.iter().map(|name| any_block(name)).collect();
    forms.sort();
    forms.dedup();
    let all = forms.iter().map(String::as_str).chain(names.iter().map(String::as_str));
    let found = near(pattern, all, 3);
    let list = if found.is_empty() { forms.iter().map(String::as_str).collect() } else { found };
    let list: Vec<_> = list.iter().map(|name| format!("\"{name}\"")).collect();
    format!("the closest names are {}", list.join(", "))
}
