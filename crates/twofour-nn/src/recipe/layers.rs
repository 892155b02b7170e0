//! Which linear layers become 2:4, and why the others do not.

use globset::{Glob, GlobMatcher};
use serde::Serialize;
use twofour::layer::MaskRule;

use super::{Mistakes, Place, Recipe, sections::Sections};
use crate::{linear::LayerForm, settings::near, train::methods::SparsityPlan};

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
    /// Whether it computes with a dense GEMM under a mask of another pattern.
    pub masked: bool,
    /// Whether its mask is then 2:4 along columns too, so that its transpose is packed as well.
    pub transposable: bool,
    /// The reason why it is sparse or dense; may be empty.
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
        let section = &*self.sparsity_of_layers();
        let keeps_zeros = self.keeps_zeros();
        let default = [section.method.layers().to_owned()];
        let own_globs = globs(section.layers.as_deref().unwrap_or(&default));
        let parts = self.sparsity_plan().ok();
        let overrides: Vec<_> = section.overrides.iter().map(|own| (globs(&own.layers), own.over(section))).collect();
        let plan = |(name, out_features, in_features): (String, usize, usize)| {
            let is_in = |globs: &[GlobMatcher]| globs.iter().any(|glob| glob.is_match(&name));
            let overriding = overrides.iter().find(|(globs, _)| is_in(globs)).map(|(_, settings)| settings);
            let settings = overriding.unwrap_or(section);
            let form = settings.method.sparse_form();
            let is_dense = form == LayerForm::Dense;
            let is_chosen = !is_dense && (overriding.is_some() || is_in(&own_globs));
            let prunes_input = is_chosen && form == LayerForm::TwoOfFourInput;
            let masked = is_chosen && form == LayerForm::Masked;
            let sparse = is_chosen && !prunes_input && !masked;
            let rule = || SparsityPlan::of_method(settings.method, vec![], 0).rule;
            let rule = settings.mask.unwrap_or_else(rule);
            let transposable = sparse && matches!(rule, MaskRule::Transposable(_));
            let reason = if sparse {
                let padding = padding(out_features, in_features, transposable);
                match (overriding, padding.as_str()) {
                    (None, "") if keeps_zeros => "its zeros are kept".to_owned(),
                    (None, _) => padding,
                    (Some(own), "") => format!("{} by an override", own.method.name()),
                    (Some(own), padding) => format!("{} by an override, {padding}", own.method.name()),
                }
            } else if masked {
                let part = parts.as_ref().and_then(|plan| plan.part_of(&name));
                let rule = part.and_then(|part| part.method.prunes(part));
                let rule = rule.map_or("masked".to_owned(), |rule| format!("prunes {rule}"));
                if overriding.is_some() { format!("{rule}, by an override") } else { rule }
            } else if prunes_input {
                "its input is 2:4, its weight dense".to_owned()
            } else if is_dense && overriding.is_some() {
                "an override makes it dense".to_owned()
            } else if is_dense {
                "the method is dense".to_owned()
            } else if keeps_zeros && self.sparsity.layers.is_none() {
                "not 2:4 in the model that training starts from".to_owned()
            } else if section.layers.is_some() {
                "no pattern of sparsity.layers matches it".to_owned()
            } else {
                "not in a feed-forward block; name it in sparsity.layers".to_owned()
            };
            LayerPlan { name, out_features, in_features, sparse, masked, transposable, reason }
        };
        self.model_config().linear_layers().into_iter().map(plan).collect()
    }
}

pub(super) fn globs(patterns: &[String]) -> Vec<GlobMatcher> {
    patterns.iter().filter_map(|pattern| Glob::new(pattern).ok()).map(|glob| glob.compile_matcher()).collect()
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

/// Notes patterns that are malformed or match no linear layer, with the closest names, and layers that are in two
/// overrides.
pub(super) fn check(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let settings = &recipe.sparsity;
    let names: Vec<String> = recipe.model_config().linear_layers().into_iter().map(|(name, ..)| name).collect();
    if let Some(patterns) = settings.layers.as_ref().filter(|_| !m.has("sparsity.layers")) {
        let place = sections.sparsity.place("layers");
        if patterns.is_empty() {
            let problem = "found an empty list; for no 2:4 layer use the method \"dense\"";
            m.add(place.clone(), "sparsity.layers", problem);
        }
        check_patterns(patterns, &names, (&place, "sparsity.layers"), m);
    }
    if let Some(why) = settings.method.only_these_layers()
        && let Some(patterns) = settings.layers.as_ref().filter(|_| !m.has("sparsity.layers"))
    {
        let (chosen, own) = (globs(patterns), settings.method.layers());
        let is_in = |globs: &[GlobMatcher], name: &String| globs.iter().any(|glob| glob.is_match(name));
        let owned = globs(&[own.to_owned()]);
        let is_other = |name: &&String| !is_in(&owned, name) && is_in(&chosen, name);
        if let Some(name) = names.iter().find(is_other) {
            let problem = format!("matches {name:?}, expected \"{own}\" or some of it: {why}");
            m.add(sections.sparsity.place("layers"), "sparsity.layers", problem);
        }
    }
    let key = "sparsity.override.layers";
    if m.has(key) {
        return;
    }
    for (index, (own, section)) in settings.overrides.iter().zip(&sections.overrides).enumerate() {
        let place = section.place("layers");
        check_patterns(&own.layers, &names, (&place, key), m);
        let (mine, earlier) = (globs(&own.layers), &settings.overrides[..index]);
        let is_in = |globs: &[GlobMatcher], name: &String| globs.iter().any(|glob| glob.is_match(name));
        let others: Vec<GlobMatcher> = earlier.iter().flat_map(|other| globs(&other.layers)).collect();
        if let Some(name) = names.iter().find(|name| is_in(&mine, name) && is_in(&others, name)) {
            m.add(place, key, format!("{name:?} is in an earlier override too, expected each layer in one"));
        }
    }
}

fn check_patterns(patterns: &[String], names: &[String], (place, key): (&Place, &str), m: &mut Mistakes) {
    for pattern in patterns {
        match Glob::new(pattern) {
            Err(error) => m.add(place.clone(), key, format!("{pattern:?}: {}", error.kind())),
            Ok(glob) => {
                let matcher = glob.compile_matcher();
                if !names.iter().any(|name| matcher.is_match(name)) {
                    let problem = format!("{pattern:?} matches no linear layer; {}", closest(pattern, names));
                    m.add(place.clone(), key, problem);
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
