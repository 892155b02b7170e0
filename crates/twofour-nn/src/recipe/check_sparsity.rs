//! Settings of sparsity against each other and against the run.

use twofour::layer::{MaskRule, WeightGradient};

use super::{
    Defaults, LayerOverride, Method, Mistakes, ModelKind, OptimizerKind, Recipe, SparsitySettings,
    check_sparsifier::CheckedSparsifier,
    parse::Sections,
    reader::Section,
    resolve::{gradient_of, mask_of},
};
use crate::{
    linear::SparsePrecision,
    train::{SparseBegin, SparsifierPlan, SparsityPlan},
};

/// What is wrong with the settings of a sparsifier under another method.
const NO_SPARSIFIER: &str = "settings of the method \"sparsifier\", which nothing here has";

/// Settings with the section that they are in.
struct Checked<'a> {
    settings: &'a SparsitySettings,
    section: &'a Section<'a>,
    /// The sparsifier's section inside it.
    sparsifier: &'a Section<'a>,
    /// The section's name.
    name: &'static str,
    steps: u64,
}

pub(super) fn check_sparsity(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let (settings, steps) = (&recipe.sparsity, recipe.training.steps);
    if m.has("sparsity.method") {
        return;
    }
    let before = m.len();
    let (section, sparsifier) = (&sections.sparsity, &sections.sparsifier);
    Checked { settings, section, sparsifier, name: "sparsity", steps }.check(m);
    let mut methods = settings.overrides.iter().filter_map(|own| own.method).chain([settings.method]);
    if sparsifier.is_present() && !methods.any(|method| method == Method::Sparsifier) {
        m.add(section.place("sparsifier"), "sparsity.sparsifier", NO_SPARSIFIER);
    }
    // What an override takes from a section that is wrong would be reported again.
    if m.len() == before && !m.has("sparsity.override.method") {
        let sections = sections.overrides.iter().zip(&sections.override_sparsifiers);
        for (own, (section, sparsifier)) in settings.overrides.iter().zip(sections) {
            check_override(settings, own, section, m);
            let settings = &own.over(settings);
            if sparsifier.is_present() && settings.method != Method::Sparsifier {
                m.add(section.place("sparsifier"), "sparsity.override.sparsifier", NO_SPARSIFIER);
            }
            Checked { settings, section, sparsifier, name: "sparsity.override", steps }.check(m);
        }
    }
    let reason = match recipe.model.kind {
        ModelKind::Llama => Some(
            "found \"activation\", whose squared ReLU takes the place of an activation without a gate; a \"llama\" has gates",
        ),
        ModelKind::Bert => Some("found \"activation\", whose squared ReLU a \"bert\" does not have"),
        _ => None,
    };
    if let Some(problem) = reason {
        if settings.method == Method::Activation {
            m.add(sections.sparsity.place("method"), "sparsity.method", problem);
        }
        for (own, section) in settings.overrides.iter().zip(&sections.overrides) {
            if own.method == Some(Method::Activation) {
                m.add(section.place("method"), "sparsity.override.method", problem);
            }
        }
    }
    if settings.method == Method::Step && recipe.training.optimizer == OptimizerKind::Sgd {
        let problem = "excluded by the method \"step\", which switches by AdamW's second moments";
        m.add(sections.training.place("optimizer"), "training.optimizer", problem);
    }
    if m.is_empty() {
        // Layers are checked on their own, with near misses.
        let mut settings = SparsitySettings { layers: None, ..settings.clone() };
        settings.overrides.clear();
        if let Err(error) = SparsityPlan::new(&settings, steps, &[]) {
            m.add(sections.sparsity.place("method"), "sparsity", error.to_string());
        }
    }
}

fn check_override(settings: &SparsitySettings, own: &LayerOverride, section: &Section<'_>, m: &mut Mistakes) {
    if own.layers.is_empty() && !m.has("sparsity.override.layers") {
        m.add(section.place("layers"), "sparsity.override.layers", "found an empty list, expected at least one name");
    }
    if own.decay.is_some() && settings.decay.is_some_and(|decay| decay.strength().is_none()) {
        let problem = "the section's trial runs (decay = \"auto\") decide it";
        m.add(section.place("decay"), "sparsity.override.decay", problem);
    }
    if own.method == Some(Method::Step) {
        let problem = "found \"step\", which watches one set of layers; make it the method of [sparsity], and give other layers the overrides";
        m.add(section.place("method"), "sparsity.override.method", problem);
    }
}

impl Checked<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    fn exclude(&self, m: &mut Mistakes, key: &str, given: bool, why: &str) {
        if given {
            let problem = format!("excluded by the method \"{}\": {why}", self.settings.method.name());
            m.add(self.section.place(key), self.key(key), problem);
        }
    }

    fn check(&self, m: &mut Mistakes) {
        let (settings, method) = (self.settings, self.settings.method);
        if method == Method::Dense {
            return self.check_dense(m);
        }
        let (mask, gradient) = (mask_of(settings), gradient_of(settings));
        let is_mvue = matches!(gradient, WeightGradient::Mvue | WeightGradient::MvueApproximate);
        let (every, is_soft) = (settings.mask_every, mask == MaskRule::SoftThreshold);
        let soft = "the soft threshold's mask and values are one, so it is chosen at every step";
        let names = "its masks are transposable: \"greedy\", \"greedy-signed\", \"causal1122\" or \"optimal\"";
        let is_transposable = matches!(mask, MaskRule::Transposable(_));
        let masked = "pruned elements would never grow back; use the method \"fixed\"";
        let decays = matches!(method, Method::SrSte | Method::Fst);
        let why = "pruned weights do not decay; use \"sr-ste\" or \"fst\"";
        let is_input = method == Method::Activation;
        let input = "it prunes the input of a layer, at each pass";
        let is_sparsifier = method == Method::Sparsifier;
        let kinds = "its masks are those of the kind in [sparsity.sparsifier]";
        let is_staged = matches!(method, Method::Ste | Method::SrSte | Method::Fst | Method::Gradual);
        let stages = "it has no stage in which groups keep three of four; use \"gradual\"";
        let switches = "only \"step\" switches by itself";
        let toolkit = "the toolkit has \"fst\", \"s-ste\" and \"step\"";
        let is_in_toolkit = matches!(method, Method::Fst | Method::SSte | Method::Step);
        for (key, given, why) in [
            ("mask", settings.mask.is_some() && is_sparsifier, kinds),
            ("weight_gradient", is_mvue && is_sparsifier, "its GEMMs are dense; \"dense\" and \"masked\" are for it"),
            (
                "precision",
                settings.precision == SparsePrecision::Fp8 && is_sparsifier,
                "its GEMMs are in the precision of activations",
            ),
            ("observe", settings.observe && is_sparsifier, "its own masks are measured whenever they are chosen"),
            ("mask_every", every.is_some() && is_input, input),
            ("weight_gradient", settings.weight_gradient.is_some() && is_input, input),
            ("precision", settings.precision == SparsePrecision::Fp8 && is_input, "its GEMMs are in f16 and bf16"),
            ("observe", settings.observe && is_input, input),
            ("mask_every", every.is_some() && method == Method::Fixed, "its mask is chosen once"),
            ("mask_every", every.is_some() && method == Method::Step, "its mask is chosen at every step"),
            ("mask_every", every.is_some_and(|n| n != 1) && method == Method::SSte, soft),
            ("weight_gradient", is_mvue && method == Method::Fixed, "MVUE is for gradients of pruned elements too"),
            ("mask", is_soft && method != Method::SSte, "use the method \"s-ste\""),
            ("mask", !is_soft && method == Method::SSte, "its mask is \"soft-threshold\""),
            ("mask", !is_transposable && !is_soft && (method == Method::Fst || is_input), names),
            (
                "weight_gradient",
                gradient == WeightGradient::Masked && method != Method::Fixed && !is_sparsifier,
                masked,
            ),
            ("decay", settings.decay.is_some() && !decays, why),
            ("decay_target", settings.decay_target.is_some() && !decays, why),
            ("two_of_four_from", settings.two_of_four_from.is_some() && !is_staged, stages),
            ("switch_latest", settings.switch_latest.is_some() && method != Method::Step, switches),
            ("switch_mean", settings.switch_mean.is_some() && method != Method::Step, switches),
            ("defaults", settings.defaults == Defaults::Toolkit && !is_in_toolkit, toolkit),
        ] {
            // The section's own defaults hold for the overrides whose method has them.
            if key != "defaults" || self.name == "sparsity" {
                self.exclude(m, key, given, why);
            }
        }
        let searches = settings.decay.is_some_and(|decay| decay.strength().is_none());
        for (key, given) in
            [("decay_grid", settings.decay_grid.is_some()), ("decay_trial_steps", settings.decay_trial_steps.is_some())]
        {
            if given && !searches && decays {
                let problem = "trial runs are for decay = \"auto\"";
                m.add(self.section.place(key), self.key(key), problem);
            }
            self.exclude(m, key, given && !decays, why);
        }
        self.check_times(m);
        if is_sparsifier {
            let Checked { settings, section: around, sparsifier: section, name, steps } = *self;
            CheckedSparsifier { settings, around, section, name, steps }.check(m);
        }
    }

    fn check_dense(&self, m: &mut Mistakes) {
        let settings = self.settings;
        for (key, given) in [
            ("layers", settings.layers.is_some() && !settings.observe && self.name == "sparsity"),
            ("mask", settings.mask.is_some() && !settings.observe),
            ("mask_every", settings.mask_every.is_some()),
            ("weight_gradient", settings.weight_gradient.is_some()),
            ("decay", settings.decay.is_some()),
            ("decay_grid", settings.decay_grid.is_some()),
            ("decay_trial_steps", settings.decay_trial_steps.is_some()),
            ("decay_target", settings.decay_target.is_some()),
            ("begin", settings.begin.is_some()),
            ("end", settings.end.is_some()),
            ("two_of_four_from", settings.two_of_four_from.is_some()),
            ("switch_latest", settings.switch_latest.is_some()),
            ("switch_mean", settings.switch_mean.is_some()),
            ("defaults", settings.defaults == Defaults::Toolkit && self.name == "sparsity"),
            (
                "precision",
                settings.precision == SparsePrecision::Fp8 && settings.overrides.is_empty() && self.name == "sparsity",
            ),
        ] {
            self.exclude(m, key, given, "no layer is 2:4");
        }
    }

    /// The steps at which layers change their form, within the run and in their order.
    fn check_times(&self, m: &mut Mistakes) {
        let (settings, s, steps) = (self.settings, self.section, self.steps);
        let times = ["begin", "end", "two_of_four_from", "switch_latest"];
        if times.iter().any(|key| m.has(&self.key(key))) || m.has("training.steps") {
            return;
        }
        if let Some(every) = settings.mask_every
            && every > steps
            && !m.has(&self.key("mask_every"))
        {
            m.add(
                s.place("mask_every"),
                self.key("mask_every"),
                format!("found {every}, beyond the run of {steps} steps"),
            );
        }
        if let Some(trial) = settings.decay_trial_steps
            && trial > steps
        {
            let problem = format!("found {trial}, beyond the run of {steps} steps");
            m.add(s.place("decay_trial_steps"), self.key("decay_trial_steps"), problem);
        }
        let own = SparsityPlan::of_method(settings.method, vec![], steps);
        let step_of = |share: f64| (share * steps as f64).round() as u64;
        let of_sparsifier = settings.sparsifier.as_ref().filter(|_| settings.method == Method::Sparsifier);
        let default = of_sparsifier.map(|own| SparsifierPlan::default_begin(own, steps));
        let given = settings.begin.map(step_of).or(default);
        let (begin, until) = match own.begin {
            SparseBegin::Step(step) => (given.unwrap_or(step), given.unwrap_or(step)),
            SparseBegin::Settled { earliest, latest } => {
                let earliest = given.unwrap_or(earliest);
                (earliest, settings.switch_latest.map_or(latest.max(earliest), step_of))
            }
        };
        if until < begin {
            let problem = format!(
                "layers would become 2:4 from step {begin} on and at the latest at step {until}; expected a share from begin up"
            );
            m.add(s.place("switch_latest"), self.key("switch_latest"), problem);
        }
        let end = settings.end.map(step_of).or(own.end).unwrap_or(steps);
        // STEP without bounds: where variances never settle, no layer becomes 2:4.
        let is_unbounded = settings.switch_latest.is_some() && begin < end && until == end;
        if until.max(begin) >= end && !is_unbounded {
            let key = match (&settings.end, &settings.switch_latest) {
                (Some(_), _) => "end",
                (None, Some(_)) if begin < end => "switch_latest",
                (None, _) => "begin",
            };
            let problem = format!(
                "layers would be 2:4 from step {} to step {end} of {steps}, which is never; expected an end after the beginning",
                until.max(begin)
            );
            m.add(s.place(key), self.key(key), problem);
        } else if let Some(from) = settings.two_of_four_from.map(step_of).or(own.two_of_four_from)
            && !(begin..end).contains(&from)
        {
            let problem = format!(
                "groups would keep two of four from step {from} on, expected a step from {begin}, where they begin to keep three, to before {end}"
            );
            m.add(s.place("two_of_four_from"), self.key("two_of_four_from"), problem);
        }
    }
}
