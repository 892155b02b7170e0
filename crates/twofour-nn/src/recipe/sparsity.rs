//! What a recipe's sparsity means for its model, and what contradicts its other sections.

use super::{LayerOverride, Method, Mistakes, ModelKind, OptimizerKind, Recipe, layers::globs, sections::Sections};
use crate::{
    Result,
    train::{
        DecaySearch,
        methods::{CheckedPart, SparsifierRule, SparsityPlan, check_override, check_part, check_plan},
    },
};

/// What is wrong with the settings of a sparsifier under another method.
const NO_SPARSIFIER: &str = "settings of the method \"sparsifier\", which nothing here has";

impl Recipe {
    /// What the method means for this model and this run: which layers are 2:4, when, and how they are trained.
    ///
    /// # Errors
    /// Those of [`SparsityPlan::new`]; none for a recipe that [`Recipe::parse`] accepted.
    pub fn sparsity_plan(&self) -> Result<SparsityPlan> {
        let names: Vec<String> = self.model_config().linear_layers().into_iter().map(|(name, ..)| name).collect();
        SparsityPlan::new(&self.sparsity_of_layers(), self.training.steps, &names)
    }

    /// The trial runs that decide the strength of the decay of pruned weights, where the recipe asks for them (`decay =
    /// "auto"`). Trials take as many steps as the warm-up of the learning rate, but at least 20 and at most all steps,
    /// unless the recipe says how many.
    pub fn decay_search(&self) -> Option<DecaySearch> {
        let settings = &self.sparsity;
        settings.decay.filter(|decay| decay.strength().is_none())?;
        let steps = settings.decay_trial_steps.unwrap_or(self.training.warm_up.max(20)).min(self.training.steps);
        Some(DecaySearch { grid: settings.decay_grid.clone().unwrap_or_else(|| DecaySearch::GRID.to_vec()), steps })
    }
}

/// Notes every contradiction.
pub(super) fn check_sparsity(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let (settings, steps) = (&recipe.sparsity, recipe.training.steps);
    if m.has("sparsity.method") {
        return;
    }
    let before = m.len();
    let (section, sparsifier) = (&sections.sparsity, &sections.sparsifier);
    let own = CheckedPart { settings, section, sparsifier, name: "sparsity", steps };
    check_part(&own, m);
    let mut methods = settings.overrides.iter().filter_map(|own| own.method).chain([settings.method]);
    if sparsifier.is_present() && !methods.any(|method| method == Method::SPARSIFIER) {
        m.add(section.place("sparsifier"), "sparsity.sparsifier", NO_SPARSIFIER);
    }
    // What an override takes from a section that is wrong would be reported again.
    if m.len() == before && !m.has("sparsity.override.method") {
        let sections = sections.overrides.iter().zip(&sections.override_sparsifiers);
        for (own, (section, sparsifier)) in settings.overrides.iter().zip(sections) {
            check_override(settings, own, section, m);
            let settings = &own.over(settings);
            if sparsifier.is_present() && settings.method != Method::SPARSIFIER {
                m.add(section.place("sparsifier"), "sparsity.override.sparsifier", NO_SPARSIFIER);
            }
            check_part(&CheckedPart { settings, section, sparsifier, name: "sparsity.override", steps }, m);
        }
    }
    let own_places = [(Some(settings.method), section, "sparsity.method")].into_iter();
    let overrides = settings.overrides.iter().zip(&sections.overrides);
    let overrides = overrides.map(|(own, section)| (own.method, section, "sparsity.override.method"));
    let (has_gates, is_encoder) = (recipe.model.kind == ModelKind::Llama, recipe.model.kind == ModelKind::Bert);
    for (method, section, key) in own_places.chain(overrides) {
        if let Some(problem) = method.and_then(|method| method.unsuitable(has_gates, is_encoder)) {
            m.add(section.place("method"), key, problem);
        }
    }
    let methods = settings.overrides.iter().filter_map(|own| own.method).chain([settings.method]);
    let required = methods.filter_map(|method| Some((method.name(), method.requires_adamw()?))).next();
    if let Some((name, why)) = required.filter(|_| recipe.training.optimizer == OptimizerKind::Sgd) {
        let problem = format!("excluded by the method \"{name}\", which requires AdamW: {why}");
        m.add(sections.training.place("optimizer"), "training.optimizer", problem);
    }
    let mut methods = settings.overrides.iter().filter_map(|own| own.method).chain([settings.method]);
    if recipe.model.from.is_none() && !m.has("model.from") && methods.any(|method| method.freezes_model()) {
        let problem = "is missing: the pruned model that stays as it is, and beside which adapters train";
        m.add(sections.model.place("from"), "model.from", problem);
    }
    if m.is_empty() {
        check_plan(&own, m);
    }
}

/// Notes bands that are wider than a layer's weight.
pub(super) fn check_bands(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    if !m.is_empty() {
        return;
    }
    let settings = &recipe.sparsity;
    let Ok(plan) = recipe.sparsity_plan() else { return };
    for (name, outputs, inputs) in recipe.model_config().linear_layers() {
        let rule = plan.part_of(&name).and_then(|part| part.sparsifier.as_ref()).map(|own| own.rule);
        let Some(SparsifierRule::NearlyDiagonal { nearliness }) = rule else { continue };
        let widest = 2 * outputs.min(inputs) - 1;
        if nearliness as usize <= widest {
            continue;
        }
        let has_layer = |own: &LayerOverride| globs(&own.layers).iter().any(|glob| glob.is_match(&name));
        let own = settings.overrides.iter().position(has_layer).and_then(|at| sections.override_sparsifiers.get(at));
        let (section, key) = match own {
            Some(section) => (section, "sparsity.override.sparsifier.nearliness"),
            None => (&sections.sparsifier, "sparsity.sparsifier.nearliness"),
        };
        let problem = format!("found {nearliness}, expected at most the {widest} diagonals of {name:?}");
        m.add(section.place("nearliness"), key, problem);
        return;
    }
}
