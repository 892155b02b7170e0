//! Which layers are 2:4, when, and how they are trained: a recipe's sparsity with the defaults of its method applied.

use globset::Glob;
use serde::{Deserialize, Serialize};
use twofour::{
    layer::{InputGradient, MaskRule, SparseLinearSettings, WeightGradient},
    select::Transposable,
};

use crate::{
    Error, Result,
    recipe::{DecayTarget, Method, SparsitySettings},
};

/// Decay of pruned elements of 2:4 weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Decay {
    /// The factor λ.
    pub strength: f64,
    /// Where it is added.
    pub target: DecayTarget,
}

/// When layers become 2:4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SparseBegin {
    /// Before the step of this number, counted from 0.
    Step(u64),
    /// Once the second moments of their weights have settled (STEP, Lu et al., ICML 2023, option 1: arithmetic mean of the change over `1 / (1 - β₂)`
    /// steps below ε): after step `earliest` and at the latest after step `latest`. From then on the second moments are frozen.
    Settled {
        /// Steps that are dense in any case.
        earliest: u64,
        /// The most steps that are dense.
        latest: u64,
    },
}

/// Which layers are 2:4, when, and how they are trained.
///
/// [`SparsityPlan::new`] makes it from a recipe's [`SparsitySettings`]; the fields are public, so that a program can also write its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SparsityPlan {
    /// The method that the plan came from.
    pub method: Method,
    /// Full names of the linear layers that are 2:4 while the plan is in force, such as `blocks.0.mlp.up`; none if dense.
    pub layers: Vec<String>,
    /// The rule of masks.
    #[serde(with = "rule_name")]
    pub rule: MaskRule,
    /// The weight gradient.
    #[serde(with = "gradient_name")]
    pub weight_gradient: WeightGradient,
    /// Optimizer steps between two selections of the mask; 0 keeps the first mask.
    pub mask_every: u64,
    /// Decay of pruned elements.
    pub decay: Option<Decay>,
    /// When layers become 2:4.
    pub begin: SparseBegin,
    /// The step, counted from 0, before which layers become dense again; never if absent.
    pub end: Option<u64>,
}

impl SparsityPlan {
    /// λ of SR-STE and FST where a recipe says nothing: the papers' value for AdamW and weights of deviation 0.02.
    pub const DEFAULT_DECAY: f64 = 2e-4;

    /// Optimizer steps between two masks where masks are transposable and a recipe says nothing.
    pub const TRANSPOSABLE_MASK_EVERY: u64 = 40;

    /// A plan in which no layer is 2:4.
    pub fn dense() -> Self {
        SparsityPlan {
            method: Method::Dense,
            layers: vec![],
            rule: MaskRule::Magnitude,
            weight_gradient: WeightGradient::Dense,
            mask_every: 1,
            decay: None,
            begin: SparseBegin::Step(0),
            end: None,
        }
    }

    /// What a method does with these layers where a recipe says nothing else, in a run of `steps` optimizer steps.
    ///
    /// | method | mask | every | weight gradient | decay | sparse steps |
    /// |---|---|---|---|---|---|
    /// | dense | | | | | none |
    /// | fixed | magnitude | first only | masked | | all |
    /// | ste | magnitude | 1 | dense | | all |
    /// | sr-ste | magnitude | 1 | dense | 2e-4, gradient | all |
    /// | fst | greedy (transposable) | 40 | mvue | 2e-4, gradient | the first five sixths |
    /// | s-ste | soft-threshold | 1 | dense | | all |
    /// | step | magnitude | 1 | dense | | from the switch on: after 10 % to 50 % of the steps |
    pub fn of_method(method: Method, layers: Vec<String>, steps: u64) -> Self {
        let gradient_decay = Decay { strength: Self::DEFAULT_DECAY, target: DecayTarget::Gradient };
        let base = SparsityPlan { method, layers, ..Self::dense() };
        match method {
            Method::Dense => Self::dense(),
            Method::Ste => base,
            Method::Fixed => SparsityPlan { weight_gradient: WeightGradient::Masked, mask_every: 0, ..base },
            Method::SrSte => SparsityPlan { decay: Some(gradient_decay), ..base },
            Method::Fst => SparsityPlan {
                rule: MaskRule::Transposable(Transposable::GreedyAbs),
                mask_every: Self::TRANSPOSABLE_MASK_EVERY,
                weight_gradient: WeightGradient::Mvue,
                decay: Some(gradient_decay),
                end: Some(steps - steps / 6),
                ..base
            },
            Method::SSte => SparsityPlan { rule: MaskRule::SoftThreshold, ..base },
            Method::Step => {
                SparsityPlan { begin: SparseBegin::Settled { earliest: steps / 10, latest: steps / 2 }, ..base }
            }
        }
    }

    /// The plan of a recipe's settings for a run of `steps` optimizer steps, over a model whose linear layers have these names. Where the settings name
    /// no layers, those of feed-forward blocks are 2:4 (names that contain `.mlp.`).
    ///
    /// # Errors
    /// A name or glob that matches no layer, values out of range, and settings that exclude each other.
    pub fn new(settings: &SparsitySettings, steps: u64, linear_layers: &[String]) -> Result<Self> {
        let layers = match (&settings.layers, settings.method) {
            (_, Method::Dense) => vec![],
            (None, _) => linear_layers.iter().filter(|name| name.contains(".mlp.")).cloned().collect(),
            (Some(patterns), _) => matching(patterns, linear_layers)?,
        };
        let mut plan = Self::of_method(settings.method, layers, steps);
        if settings.method == Method::Dense {
            return match settings {
                SparsitySettings { mask: None, mask_every: None, weight_gradient: None, decay: None, .. } => Ok(plan),
                _ => Err(conflict("method `dense`", "settings of masks", "no layer is 2:4; choose another method")),
            };
        }
        if let Some(name) = &settings.mask {
            plan.rule = rule_of(name)?;
        }
        if let Some(name) = &settings.weight_gradient {
            plan.weight_gradient = gradient_of(name)?;
        }
        plan.mask_every = settings.mask_every.unwrap_or(plan.mask_every);
        if settings.decay.is_some() || settings.decay_target.is_some() {
            let before = plan.decay.unwrap_or(Decay { strength: Self::DEFAULT_DECAY, target: DecayTarget::Gradient });
            let strength = settings.decay.unwrap_or(before.strength);
            let target = settings.decay_target.unwrap_or(before.target);
            plan.decay = (strength != 0.0).then_some(Decay { strength, target });
        }
        let step_of = |share: f64| (share * steps as f64).round() as u64;
        for (what, share) in [("sparsity.begin", settings.begin), ("sparsity.end", settings.end)] {
            if let Some(share) = share.filter(|share| !(0.0..=1.0).contains(share)) {
                return Err(Error::Setting { what, found: share.to_string(), expected: "a share from 0 to 1" });
            }
        }
        match (settings.begin, &mut plan.begin) {
            (Some(begin), SparseBegin::Step(step)) => *step = step_of(begin),
            (Some(begin), SparseBegin::Settled { earliest, latest }) => {
                *earliest = step_of(begin);
                *latest = (*latest).max(*earliest);
            }
            (None, _) => {}
        }
        if let Some(end) = settings.end {
            plan.end = Some(step_of(end)).filter(|end| *end < steps);
        }
        plan.check()?;
        Ok(plan)
    }

    /// Checks the settings against each other.
    ///
    /// # Errors
    /// Values out of range, and settings that exclude each other.
    pub fn check(&self) -> Result<()> {
        if let Some(Decay { strength, .. }) = self.decay
            && !(strength >= 0.0 && strength.is_finite())
        {
            let expected = "a finite number from 0 up";
            return Err(Error::Setting { what: "sparsity.decay", found: strength.to_string(), expected });
        }
        let begin = match self.begin {
            SparseBegin::Step(step) => step,
            SparseBegin::Settled { earliest, latest } if earliest > latest => {
                let (found, expected) = (format!("{earliest} to {latest}"), "a range from its lower end to its upper");
                return Err(Error::Setting { what: "the steps of STEP's switch", found, expected });
            }
            SparseBegin::Settled { earliest, .. } => earliest,
        };
        if let Some(end) = self.end.filter(|end| *end < begin) {
            let (found, expected) = (format!("{end}, before {begin}"), "at or after the step where sparsity begins");
            return Err(Error::Setting { what: "the step where sparsity ends", found, expected });
        }
        if self.rule == MaskRule::SoftThreshold && self.decay.is_some() {
            let reason = "the soft threshold subtracts from kept weights by what it prunes, and needs no decay";
            return Err(conflict("mask `soft-threshold`", "`decay`", reason));
        }
        if self.rule == MaskRule::SoftThreshold && self.mask_every != 1 {
            let reason = "mask and values of the soft threshold are one, and change with every step";
            return Err(conflict("mask `soft-threshold`", "`mask_every` other than 1", reason));
        }
        if self.rule == MaskRule::Given {
            let reason = "a run of the trainer selects its masks";
            return Err(conflict("mask `given`", "training", reason));
        }
        Ok(())
    }

    /// The settings of the 2:4 layers.
    pub fn layer_settings(&self) -> SparseLinearSettings {
        SparseLinearSettings {
            rule: self.rule,
            input_gradient: InputGradient::Automatic,
            weight_gradient: self.weight_gradient,
        }
    }

    /// Whether the mask is selected anew after so many optimizer steps of the run.
    pub fn selects_mask_after(&self, steps_done: u64) -> bool {
        self.mask_every != 0 && steps_done.is_multiple_of(self.mask_every)
    }
}

fn conflict(first: &str, second: &str, reason: &'static str) -> Error {
    Error::Conflict { first: first.to_owned(), second: second.to_owned(), reason }
}

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

/// The rule of that name, as [`MaskRule::name`] has it.
fn rule_of(name: &str) -> Result<MaskRule> {
    let expected = "magnitude, greedy, greedy-signed, causal1122, optimal or soft-threshold";
    let rule = MaskRule::CHOOSING.into_iter().find(|rule| rule.name() == name);
    rule.ok_or_else(|| Error::Setting { what: "sparsity.mask", found: name.to_owned(), expected })
}

/// The names of weight gradients in recipes.
const GRADIENTS: [(&str, WeightGradient); 4] = [
    ("dense", WeightGradient::Dense),
    ("masked", WeightGradient::Masked),
    ("mvue", WeightGradient::Mvue),
    ("mvue-approximate", WeightGradient::MvueApproximate),
];

fn gradient_of(name: &str) -> Result<WeightGradient> {
    let expected = "dense, masked, mvue or mvue-approximate";
    let gradient = GRADIENTS.iter().find(|(own, _)| *own == name).map(|(_, gradient)| *gradient);
    gradient.ok_or_else(|| Error::Setting { what: "sparsity.weight_gradient", found: name.to_owned(), expected })
}

mod rule_name {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use twofour::layer::MaskRule;

    pub(super) fn serialize<S: Serializer>(rule: &MaskRule, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(rule.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MaskRule, D::Error> {
        super::rule_of(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

mod gradient_name {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use twofour::layer::WeightGradient;

    pub(super) fn serialize<S: Serializer>(gradient: &WeightGradient, serializer: S) -> Result<S::Ok, S::Error> {
        let name = super::GRADIENTS.iter().find(|(_, own)| own == gradient).map_or("dense", |(name, _)| *name);
        serializer.serialize_str(name)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<WeightGradient, D::Error> {
        super::gradient_of(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        ["attn.qkv", "attn.out", "mlp.up", "mlp.down"].map(|part| format!("blocks.0.{part}")).to_vec()
    }

    fn plan(settings: SparsitySettings) -> Result<SparsityPlan> {
        SparsityPlan::new(&settings, 600, &names())
    }

    #[test]
    fn methods_have_their_defaults_and_settings_win() {
        let fst = plan(SparsitySettings { method: Method::Fst, ..Default::default() }).unwrap();
        assert_eq!((fst.end, fst.mask_every, fst.weight_gradient), (Some(500), 40, WeightGradient::Mvue));
        assert_eq!(fst.layers, ["blocks.0.mlp.up", "blocks.0.mlp.down"]);
        let own = SparsitySettings {
            method: Method::Fst,
            layers: Some(vec!["*.attn.*".to_owned()]),
            mask: Some("optimal".to_owned()),
            mask_every: Some(5),
            decay: Some(0.0),
            end: Some(1.0),
            ..Default::default()
        };
        let own = plan(own).unwrap();
        assert_eq!((own.end, own.mask_every, own.decay), (None, 5, None));
        assert_eq!(own.rule, MaskRule::Transposable(Transposable::Optimal));
        assert_eq!(own.layers, ["blocks.0.attn.qkv", "blocks.0.attn.out"]);
        let text = serde_json::to_string(&own).unwrap();
        assert_eq!(serde_json::from_str::<SparsityPlan>(&text).unwrap(), own);
        assert_eq!(plan(SparsitySettings::default()).unwrap(), SparsityPlan::dense());
    }

    #[test]
    fn mistakes_are_named() {
        let sste = SparsitySettings { method: Method::SSte, ..Default::default() };
        let ste = SparsitySettings { method: Method::Ste, ..Default::default() };
        for (bad, word) in [
            (SparsitySettings { layers: Some(vec!["*.mpl.*".to_owned()]), ..ste.clone() }, "*.mpl.*"),
            (SparsitySettings { mask: Some("largest".to_owned()), ..ste.clone() }, "magnitude, greedy"),
            (SparsitySettings { weight_gradient: Some("sparse".to_owned()), ..ste.clone() }, "mvue-approximate"),
            (SparsitySettings { begin: Some(0.5), end: Some(0.2), ..ste.clone() }, "120, before 300"),
            (SparsitySettings { end: Some(1.5), ..ste.clone() }, "sparsity.end"),
            (SparsitySettings { decay: Some(-1.0), ..ste }, "sparsity.decay"),
            (SparsitySettings { decay: Some(1e-4), ..sste.clone() }, "exclude each other"),
            (SparsitySettings { mask_every: Some(3), ..sste }, "exclude each other"),
            (SparsitySettings { decay: Some(1e-4), ..Default::default() }, "dense"),
        ] {
            let message = plan(bad).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }
}
