//! Settings of sparsity against each other and against the run.

use twofour::layer::MaskRule;

use super::{LayerOverride, Method, Rules, SparseBegin, SparsityPlan, SparsitySettings, step, step_of};
use crate::{
    linear::LayerForm,
    settings::{Mistakes, Section},
};

/// The settings of a part of a recipe with the sections that they are in.
#[derive(Debug)]
pub struct CheckedPart<'a> {
    pub(crate) settings: &'a SparsitySettings,
    pub(crate) section: &'a Section<'a>,
    /// The sparsifier's section inside it.
    pub(crate) sparsifier: &'a Section<'a>,
    /// The section's name.
    pub(crate) name: &'static str,
    /// Steps of the run.
    pub(crate) steps: u64,
}

const DECAY: &str = "pruned weights do not decay; use \"sr-ste\" or \"fst\"";

/// The settings that only some methods have, and why the others do not.
const OF_SOME: [(&str, &str); 6] = [
    ("decay", DECAY),
    ("decay_target", DECAY),
    ("decay_grid", DECAY),
    ("decay_trial_steps", DECAY),
    ("two_of_four_from", "it has no stage in which groups keep three of four; use \"gradual\""),
    ("defaults", "the toolkit has \"fst\", \"s-ste\" and \"step\""),
];

/// Notes what is wrong with the settings of an override beside what is wrong with its part.
pub(crate) fn check_override(
    settings: &SparsitySettings,
    own: &LayerOverride,
    section: &Section<'_>,
    m: &mut Mistakes,
) {
    if own.layers.is_empty() && !m.has("sparsity.override.layers") {
        m.add(section.place("layers"), "sparsity.override.layers", "found an empty list, expected at least one name");
    }
    if own.decay.is_some() && settings.decay.is_some_and(|decay| decay.strength().is_none()) {
        let problem = "the section's trial runs (decay = \"auto\") decide it";
        m.add(section.place("decay"), "sparsity.override.decay", problem);
    }
    if let Some(method) = own.method.filter(|method| method.watches()) {
        let problem = format!(
            "found \"{}\", which watches one set of layers; make it the method of [sparsity], and give other layers \
             the overrides",
            method.name()
        );
        m.add(section.place("method"), "sparsity.override.method", problem);
    }
}

/// Notes what is wrong with the settings of a part.
pub(crate) fn check_part(part: &CheckedPart<'_>, m: &mut Mistakes) {
    if part.settings.method.sparse_form() == LayerForm::Dense { part.check_dense(m) } else { part.check(m) }
}

/// Notes what the plan of the section alone finds; layers are checked on their own, with near misses.
pub(crate) fn check_plan(part: &CheckedPart<'_>, m: &mut Mistakes) {
    let settings = SparsitySettings { layers: None, overrides: vec![], ..part.settings.clone() };
    if let Err(error) = SparsityPlan::new(&settings, part.steps, &[]) {
        m.add(part.section.place("method"), "sparsity", error.to_string());
    }
}

impl CheckedPart<'_> {
    fn method(&self) -> Method {
        self.settings.method
    }

    pub(crate) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    /// Notes that the method excludes a setting.
    pub(super) fn exclude(&self, m: &mut Mistakes, key: &str, why: &str) {
        let problem = format!("excluded by the method \"{}\": {why}", self.method().name());
        m.add(self.section.place(key), self.key(key), problem);
    }

    fn check(&self, m: &mut Mistakes) {
        let (settings, method) = (self.settings, self.method());
        let defaults = SparsityPlan::of_method(method, vec![], 0);
        let mask = settings.mask.unwrap_or(defaults.rule);
        let gradient = settings.weight_gradient.unwrap_or(defaults.weight_gradient);
        for key in settings.given() {
            let own = method.excludes().iter().find(|(excluded, _)| *excluded == key);
            let of_some = OF_SOME.iter().find(|(of_some, _)| *of_some == key && !method.has().contains(&key));
            let others = super::METHODS.iter().filter(|other| **other != method).flat_map(|other| other.own());
            let others = others.filter(|_| !method.own().iter().any(|own| own.key == key));
            let elsewhere = others.filter(|other| other.key == key).map(|other| (other.key, other.elsewhere)).next();
            // The section's own defaults hold for the overrides whose method has them.
            if let Some((_, why)) = own.or(of_some).copied().or(elsewhere)
                && (key != "defaults" || self.name == "sparsity")
            {
                self.exclude(m, key, why);
            }
        }
        let names = "its masks are transposable: \"greedy\", \"greedy-signed\", \"causal1122\" or \"optimal\"";
        match (method.rules(), mask) {
            (Rules::Soft, MaskRule::SoftThreshold) => {}
            (_, MaskRule::SoftThreshold) => self.exclude(m, "mask", "use the method \"s-ste\""),
            (Rules::Soft, _) => self.exclude(m, "mask", "its mask is \"soft-threshold\""),
            (Rules::Transposable, MaskRule::Transposable(_)) | (Rules::Hard, _) => {}
            (Rules::Transposable, _) => self.exclude(m, "mask", names),
        }
        if let Some(why) = method.refuses(gradient) {
            self.exclude(m, "weight_gradient", why);
        }
        let searches = settings.decay.is_some_and(|decay| decay.strength().is_none());
        for (key, given) in
            [("decay_grid", settings.decay_grid.is_some()), ("decay_trial_steps", settings.decay_trial_steps.is_some())]
        {
            if given && !searches && method.has().contains(&key) {
                let problem = "trial runs are for decay = \"auto\"";
                m.add(self.section.place(key), self.key(key), problem);
            }
        }
        self.check_times(m);
        method.check(self, m);
    }

    /// No layer is sparse: what is given has nothing to do, but for what is observed or for overrides.
    fn check_dense(&self, m: &mut Mistakes) {
        let settings = self.settings;
        let is_section = self.name == "sparsity";
        if settings.layers.is_some() && !settings.observe && is_section {
            self.exclude(m, "layers", "no layer is 2:4");
        }
        for key in settings.given() {
            let has_effect = match key {
                "observe" => true,
                "mask" => settings.observe,
                "defaults" => !is_section,
                "precision" => !is_section || !settings.overrides.is_empty(),
                _ => false,
            };
            if !has_effect {
                self.exclude(m, key, "no layer is 2:4");
            }
        }
    }

    /// The steps at which layers change their form, within the run and in their order.
    fn check_times(&self, m: &mut Mistakes) {
        let (settings, s, steps) = (self.settings, self.section, self.steps);
        let times = ["begin", "end", "two_of_four_from", step::LATEST.key];
        if times.iter().any(|key| m.has(&self.key(key))) || m.has("training.steps") {
            return;
        }
        for (key, given) in [("mask_every", settings.mask_every), ("decay_trial_steps", settings.decay_trial_steps)] {
            if let Some(found) = given.filter(|found| *found > steps && !m.has(&self.key(key))) {
                m.add(s.place(key), self.key(key), format!("found {found}, beyond the run of {steps} steps"));
            }
        }
        let own = SparsityPlan::of_method(settings.method, vec![], steps);
        let (begin, until) = match settings.method.begin(settings, own.begin, steps) {
            SparseBegin::Step(step) => (step, step),
            SparseBegin::Settled { earliest, latest } => (earliest, latest),
        };
        let has_latest = settings.own.has(step::LATEST.key);
        if until < begin {
            let problem = format!(
                "layers would become 2:4 from step {begin} on and at the latest at step {until}; expected a share from \
                 begin up"
            );
            m.add(s.place(step::LATEST.key), self.key(step::LATEST.key), problem);
        }
        let end = settings.end.map(|share| step_of(share, steps)).or(own.end).unwrap_or(steps);
        // STEP without bounds: where variances never settle, no layer becomes 2:4.
        let is_unbounded = has_latest && begin < end && until == end;
        if until.max(begin) >= end && !is_unbounded {
            let key = match (&settings.end, has_latest) {
                (Some(_), _) => "end",
                (None, true) if begin < end => step::LATEST.key,
                (None, _) => "begin",
            };
            let problem = format!(
                "layers would be 2:4 from step {} to step {end} of {steps}, which is never; expected an end after the \
                 beginning",
                until.max(begin)
            );
            m.add(s.place(key), self.key(key), problem);
        } else if let Some(from) = settings.two_of_four_from.map(|share| step_of(share, steps)).or(own.two_of_four_from)
            && !(begin..end).contains(&from)
        {
            let problem = format!(
                "groups would keep two of four from step {from} on, expected a step from {begin}, where they begin to \
                 keep three, to before {end}"
            );
            m.add(s.place("two_of_four_from"), self.key("two_of_four_from"), problem);
        }
    }
}
