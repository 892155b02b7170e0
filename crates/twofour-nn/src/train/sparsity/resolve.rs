//! From a recipe's settings to a plan.

use twofour::{
    layer::{MaskRule, WeightGradient},
    select::Transposable,
};

use super::{
    Decay, SparseBegin, SparsityPlan, conflict,
    names::{gradient_of, matching, rule_of},
};
use crate::{
    Error, Result,
    recipe::{DecayTarget, Defaults, Method, SparsitySettings},
    train::SparsifierPlan,
};

impl SparsityPlan {
    /// λ of FST for GPT-2 124M and 774M in the 2by4-pretrain toolkit.
    pub const TOOLKIT_DECAY: f64 = 6e-5;

    /// The plan of a recipe's settings for a run of `steps` optimizer steps, over a model whose linear layers have these names. Where the settings name
    /// no layers, those of feed-forward blocks are 2:4 (names that contain `.mlp.`). A strength of the decay that is still to be searched for
    /// (`decay = "auto"`) is the default until [`SparsityPlan::set_decay`] sets it.
    ///
    /// # Errors
    /// A name or glob that matches no layer, values out of range, and settings that exclude each other.
    pub fn new(settings: &SparsitySettings, steps: u64, linear_layers: &[String]) -> Result<Self> {
        let mut plan = Self::part(settings, steps, linear_layers)?;
        for own in &settings.overrides {
            let part = Self::part(&own.over(settings), steps, linear_layers)?;
            let names = matching(&own.layers, linear_layers)?;
            if let Some(twice) = plan.overrides.iter().find_map(|other| other.layers.iter().find(|l| names.contains(l)))
            {
                let expected = "in one [[sparsity.override]]; a layer can be in no other";
                return Err(Error::Setting { what: "sparsity.override.layers", found: twice.clone(), expected });
            }
            plan.layers.retain(|layer| !names.contains(layer));
            if part.method != Method::Dense || part.observes {
                plan.overrides.push(part);
            }
        }
        plan.check()?;
        Ok(plan)
    }

    /// A plan without overrides.
    fn part(settings: &SparsitySettings, steps: u64, linear_layers: &[String]) -> Result<Self> {
        let layers = match &settings.layers {
            _ if settings.method == Method::Dense && !settings.observe => vec![],
            None if settings.method == Method::Activation => {
                linear_layers.iter().filter(|name| name.ends_with(".mlp.down")).cloned().collect()
            }
            None => linear_layers.iter().filter(|name| name.contains(".mlp.")).cloned().collect(),
            Some(patterns) => matching(patterns, linear_layers)?,
        };
        let mut plan = Self::of_method(settings.method, layers.clone(), steps);
        plan.observes = settings.observe;
        if let Some(name) = &settings.mask {
            plan.rule = rule_of(name)?;
        }
        if settings.method == Method::Dense {
            plan.layers = layers;
            return match settings {
                SparsitySettings { mask: Some(_), observe: false, .. }
                | SparsitySettings { mask_every: Some(_), .. }
                | SparsitySettings { weight_gradient: Some(_), .. }
                | SparsitySettings { decay: Some(_), .. } => {
                    Err(conflict("method `dense`", "settings of masks", "no layer is 2:4; choose another method"))
                }
                _ => Ok(plan),
            };
        }
        if settings.defaults == Defaults::Toolkit {
            plan.apply_toolkit(settings.mask.is_none());
        }
        if let Some(name) = &settings.weight_gradient {
            plan.weight_gradient = gradient_of(name)?;
        }
        plan.mask_every = settings.mask_every.unwrap_or(plan.mask_every);
        if settings.decay.is_some() || settings.decay_target.is_some() {
            let before = plan.decay.unwrap_or(Decay { strength: Self::DEFAULT_DECAY, target: DecayTarget::Gradient });
            let strength = settings.decay.and_then(|decay| decay.strength()).unwrap_or(before.strength);
            let target = settings.decay_target.unwrap_or(before.target);
            plan.decay = (strength != 0.0).then_some(Decay { strength, target });
        }
        plan.precision = settings.precision;
        plan.apply_times(settings, steps)?;
        plan.apply_sparsifier(settings, steps)?;
        Ok(plan)
    }

    /// The masks of the method `sparsifier`, and the times and gradients that follow from them where the settings say nothing.
    fn apply_sparsifier(&mut self, settings: &SparsitySettings, steps: u64) -> Result<()> {
        if self.method != Method::Sparsifier {
            return Ok(());
        }
        let own = settings.sparsifier.clone().unwrap_or_default();
        if settings.begin.is_none() {
            self.begin = SparseBegin::Step(SparsifierPlan::default_begin(&own, steps));
        }
        if settings.mask_every.is_none() {
            self.mask_every = SparsifierPlan::default_mask_every(&own, steps);
        }
        if let SparseBegin::Step(begin) = self.begin {
            let sparsifier = SparsifierPlan::new(&own, begin, steps)?;
            if sparsifier.in_place && settings.weight_gradient.is_none() {
                self.weight_gradient = WeightGradient::Masked;
            }
            self.sparsifier = Some(sparsifier);
        }
        Ok(())
    }

    /// The toolkit's settings of a method, where they are other than the method's own.
    fn apply_toolkit(&mut self, chooses_rule: bool) {
        if self.method == Method::Fst {
            if chooses_rule {
                self.rule = MaskRule::Transposable(Transposable::Optimal);
            }
            self.decay = self.decay.map(|decay| Decay { strength: Self::TOOLKIT_DECAY, ..decay });
        }
        if matches!(self.method, Method::Fst | Method::SSte) {
            self.weight_gradient = WeightGradient::MvueApproximate;
        }
    }

    /// Shares of the run, as steps.
    fn apply_times(&mut self, settings: &SparsitySettings, steps: u64) -> Result<()> {
        let step_of = |share: f64| (share * steps as f64).round() as u64;
        for (what, share) in [
            ("sparsity.begin", settings.begin),
            ("sparsity.end", settings.end),
            ("sparsity.two_of_four_from", settings.two_of_four_from),
            ("sparsity.switch_latest", settings.switch_latest),
        ] {
            if let Some(share) = share.filter(|share| !(0.0..=1.0).contains(share)) {
                return Err(Error::Setting { what, found: share.to_string(), expected: "a share from 0 to 1" });
            }
        }
        match &mut self.begin {
            SparseBegin::Step(step) => *step = settings.begin.map_or(*step, step_of),
            SparseBegin::Settled { earliest, latest } => {
                *earliest = settings.begin.map_or(*earliest, step_of);
                *latest = settings.switch_latest.map_or((*latest).max(*earliest), step_of);
            }
        }
        if let Some(end) = settings.end {
            self.end = Some(step_of(end)).filter(|end| *end < steps);
        }
        self.two_of_four_from = settings.two_of_four_from.map(step_of).or(self.two_of_four_from);
        self.switch_mean = settings.switch_mean.unwrap_or_default();
        Ok(())
    }

    /// Replaces the strength of the decay in the plan and in those of its overrides that decay; 0 is none.
    pub fn set_decay(&mut self, strength: f64) {
        let replace = |decay: &mut Option<Decay>| {
            *decay = decay.map(|decay| Decay { strength, ..decay }).filter(|decay| decay.strength != 0.0);
        };
        replace(&mut self.decay);
        self.overrides.iter_mut().for_each(|part| replace(&mut part.decay));
    }

    /// Leaves all layers dense; observed masks stay. A decay of pruned weights has nothing to do then.
    pub(crate) fn make_dense(&mut self) {
        (self.method, self.decay, self.sparsifier) = (Method::Dense, None, None);
        for part in &mut self.overrides {
            (part.method, part.decay, part.sparsifier) = (Method::Dense, None, None);
        }
    }
}
