//! From a recipe's settings to a plan.

use globset::Glob;

use super::{Decay, Defaults, Method, SparsityPlan, SparsitySettings, conflict, step_of};
use crate::{Error, Result, linear::LayerForm};

/// The layers that match any of the patterns, in the model's order.
fn matching(patterns: &[String], layers: &[String]) -> Result<Vec<String>> {
    let mut chosen = vec![false; layers.len()];
    for pattern in patterns {
        let no_such_layer = || Error::NoSuchLayer { pattern: pattern.clone(), layers: layers.to_vec() };
        let glob = Glob::new(pattern).map_err(|_| no_such_layer())?.compile_matcher();
        let mut found = false;
        for (chosen, layer) in chosen.iter_mut().zip(layers) {
            let matches = glob.is_match(layer);
            *chosen |= matches;
            found |= matches;
        }
        if !found {
            return Err(no_such_layer());
        }
    }
    Ok(layers.iter().zip(chosen).filter(|(_, chosen)| *chosen).map(|(layer, _)| layer.clone()).collect())
}

impl SparsityPlan {
    /// The plan of a recipe's settings for a run of `steps` optimizer steps, over a model whose linear layers have
    /// these names. Where the settings name no layers, those of feed-forward blocks are 2:4 (names that contain
    /// `.mlp.`). A strength of the decay that is still to be searched for (`decay = "auto"`) is the default until
    /// [`SparsityPlan::set_decay`] sets it.
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
            if !part.is_dense() || part.observes {
                plan.overrides.push(part);
            }
        }
        plan.check()?;
        Ok(plan)
    }

    /// A plan without overrides.
    fn part(settings: &SparsitySettings, steps: u64, linear_layers: &[String]) -> Result<Self> {
        let method = settings.method;
        let layers = match &settings.layers {
            _ if method.sparse_form() == LayerForm::Dense && !settings.observe => vec![],
            // A model may have no layer that the method is for.
            None => matching(&[method.layers().to_owned()], linear_layers).unwrap_or_default(),
            Some(patterns) => matching(patterns, linear_layers)?,
        };
        let mut plan = Self::of_method(method, layers.clone(), steps);
        plan.observes = settings.observe;
        if plan.is_dense() {
            plan.layers = layers;
            plan.rule = settings.mask.unwrap_or(plan.rule);
            let has_masks = settings.mask_every.is_some() || settings.weight_gradient.is_some();
            if has_masks || settings.decay.is_some() || (settings.mask.is_some() && !settings.observe) {
                let (method, reason) =
                    (format!("method `{}`", method.name()), "no layer is 2:4; choose another method");
                return Err(conflict(&method, "settings of masks", reason));
            }
            return Ok(plan);
        }
        if settings.defaults == Defaults::Toolkit {
            method.toolkit_defaults(&mut plan);
        }
        plan.rule = settings.mask.unwrap_or(plan.rule);
        plan.weight_gradient = settings.weight_gradient.unwrap_or(plan.weight_gradient);
        plan.mask_every = settings.mask_every.unwrap_or(plan.mask_every);
        if settings.decay.is_some() || settings.decay_target.is_some() {
            let before = plan.decay.unwrap_or(Decay::PUBLISHED);
            let strength = settings.decay.and_then(|decay| decay.strength()).unwrap_or(before.strength);
            let target = settings.decay_target.unwrap_or(before.target);
            plan.decay = (strength != 0.0).then_some(Decay { strength, target });
        }
        plan.precision = settings.precision;
        plan.apply_times(settings, steps)?;
        method.resolve(&mut plan, settings, steps)?;
        Ok(plan)
    }

    /// Shares of the run, as steps.
    fn apply_times(&mut self, settings: &SparsitySettings, steps: u64) -> Result<()> {
        for (what, share) in [
            ("sparsity.begin", settings.begin),
            ("sparsity.end", settings.end),
            ("sparsity.two_of_four_from", settings.two_of_four_from),
            ("sparsity.switch_latest", settings.own.number("switch_latest")),
        ] {
            if let Some(share) = share.filter(|share| !(0.0..=1.0).contains(share)) {
                return Err(Error::Setting { what, found: share.to_string(), expected: "a share from 0 to 1" });
            }
        }
        self.begin = self.method.begin(settings, self.begin, steps);
        if let Some(end) = settings.end {
            self.end = Some(step_of(end, steps)).filter(|end| *end < steps);
        }
        self.two_of_four_from = settings.two_of_four_from.map(|share| step_of(share, steps)).or(self.two_of_four_from);
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
        (self.method, self.decay, self.sparsifier) = (Method::DENSE, None, None);
        for part in &mut self.overrides {
            (part.method, part.decay, part.sparsifier) = (Method::DENSE, None, None);
        }
    }
}
