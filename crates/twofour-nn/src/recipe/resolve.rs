//! What a method means: every choice of [`SparsitySettings`] made.

use twofour::{
    layer::{MaskRule, WeightGradient},
    select::Transposable,
};

use super::{
    Recipe, SparsitySettings,
    reader::{Named, name_of},
};
use crate::{Result, train::SparsityPlan};

impl Named for MaskRule {
    const ALL: &'static [(&'static str, Self)] = &[
        ("magnitude", MaskRule::Magnitude),
        ("greedy", MaskRule::Transposable(Transposable::GreedyAbs)),
        ("greedy-signed", MaskRule::Transposable(Transposable::GreedySigned)),
        ("causal1122", MaskRule::Transposable(Transposable::Causal1122)),
        ("optimal", MaskRule::Transposable(Transposable::Optimal)),
        ("soft-threshold", MaskRule::SoftThreshold),
    ];
}

impl Named for WeightGradient {
    const ALL: &'static [(&'static str, Self)] = &[
        ("dense", WeightGradient::Dense),
        ("masked", WeightGradient::Masked),
        ("mvue", WeightGradient::Mvue),
        ("mvue-approximate", WeightGradient::MvueApproximate),
    ];
}

pub(super) fn mask_name(rule: MaskRule) -> String {
    name_of(rule).to_owned()
}

pub(super) fn gradient_name(gradient: WeightGradient) -> String {
    name_of(gradient).to_owned()
}

/// The mask rule of a method; a name that is not known counts as absent.
pub(super) fn mask_of(settings: &SparsitySettings) -> MaskRule {
    named(settings.mask.as_deref()).unwrap_or_else(|| SparsityPlan::of_method(settings.method, vec![], 0).rule)
}

/// The weight gradient of a method.
pub(super) fn gradient_of(settings: &SparsitySettings) -> WeightGradient {
    let own = || SparsityPlan::of_method(settings.method, vec![], 0).weight_gradient;
    named(settings.weight_gradient.as_deref()).unwrap_or_else(own)
}

fn named<T: Named>(name: Option<&str>) -> Option<T> {
    T::ALL.iter().find(|(known, _)| Some(*known) == name).map(|(_, value)| *value)
}

impl Recipe {
    /// What the method means for this model and this run: which layers are 2:4, when, and how they are trained.
    ///
    /// # Errors
    /// Those of [`SparsityPlan::new`]; none for a recipe that [`Recipe::parse`] accepted.
    pub fn sparsity_plan(&self) -> Result<SparsityPlan> {
        let names: Vec<String> = self.model_config().linear_layers().into_iter().map(|(name, ..)| name).collect();
        SparsityPlan::new(&self.sparsity_of_layers(), self.training.steps, &names)
    }
}
