//! The plan of a run's sparsity.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use twofour::{
    layer::{InputGradient, MaskRule, SparseLinearSettings, WeightGradient},
    select::Transposable,
};

use super::{
    conflict,
    names::{gradient_name, rule_name},
};
use crate::{
    Error, Result,
    engine::PrunedDecay,
    linear::SparsePrecision,
    recipe::{DecayTarget, Method, SparsifierCriterion, SwitchMean},
    train::SparsifierPlan,
};

/// Decay of pruned elements of 2:4 weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Decay {
    /// The factor λ.
    pub strength: f64,
    /// Where it is added.
    pub target: DecayTarget,
}

impl From<Decay> for PrunedDecay {
    fn from(decay: Decay) -> Self {
        match decay {
            Decay { strength, target: DecayTarget::Gradient } => PrunedDecay::Gradient { strength: strength as f32 },
            Decay { strength, target: DecayTarget::Weight } => PrunedDecay::Weight { strength },
        }
    }
}

/// When layers become 2:4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SparseBegin {
    /// Before the step of this number, counted from 0.
    Step(u64),
    /// Once the second moments of their weights have settled (STEP, Lu et al., ICML 2023: the mean of the change over `1 / (1 - β₂)` steps is below ε;
    /// [`SparsityPlan::switch_mean`]): after step `earliest` and at the latest after step `latest`. From then on the second moments are frozen.
    Settled {
        /// Steps that are dense in any case.
        earliest: u64,
        /// The most steps that are dense.
        latest: u64,
    },
}

/// Which layers are 2:4, when, and how they are trained.
///
/// [`SparsityPlan::new`] makes it from a recipe's [`SparsitySettings`](crate::recipe::SparsitySettings); the fields are public, so that a program can also write its own.
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
    /// The step, counted from 0, from which groups keep two of four; from `begin` until then they keep three (3:4). Two from `begin` on if absent.
    #[serde(default)]
    pub two_of_four_from: Option<u64>,
    /// The precision of the GEMMs of 2:4 layers.
    #[serde(default)]
    pub precision: SparsePrecision,
    /// The mean of second moments' changes by which STEP switches.
    #[serde(default)]
    pub switch_mean: SwitchMean,
    /// Whether the mask that the rule would select is selected after every step for each of the layers, whatever their form, so that its flip rate can be
    /// compared with that of another run. Nothing computes with it.
    #[serde(default)]
    pub observes: bool,
    /// The masks of [`Method::Sparsifier`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sparsifier: Option<SparsifierPlan>,
    /// Layers with plans of their own. Their `overrides` are empty, and no layer is in two parts.
    #[serde(default)]
    pub overrides: Vec<SparsityPlan>,
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
            two_of_four_from: None,
            precision: SparsePrecision::Activations,
            switch_mean: SwitchMean::Arithmetic,
            observes: false,
            sparsifier: None,
            overrides: vec![],
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
    /// | activation | greedy (transposable), of the layer's input | each pass | dense | | all |
    /// | gradual | magnitude | 1 | dense | | 3:4 after 10 %, 2:4 after 30 % of the steps |
    /// | sparsifier | [`SparsifierPlan::TWO_OF_FOUR`] | a hundredth of the steps | dense | | all, in dense GEMMs |
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
            Method::Gradual => {
                SparsityPlan { begin: SparseBegin::Step(steps / 10), two_of_four_from: Some(3 * steps / 10), ..base }
            }
            Method::Sparsifier => {
                SparsityPlan { sparsifier: Some(SparsifierPlan::TWO_OF_FOUR), mask_every: (steps / 100).max(1), ..base }
            }
            Method::Activation => SparsityPlan { rule: MaskRule::Transposable(Transposable::GreedyAbs), ..base },
            Method::Step => {
                SparsityPlan { begin: SparseBegin::Settled { earliest: steps / 10, latest: steps / 2 }, ..base }
            }
        }
    }

    /// Checks the settings against each other.
    ///
    /// # Errors
    /// Values out of range, and settings that exclude each other.
    pub fn check(&self) -> Result<()> {
        self.check_part()?;
        let mut names = HashSet::new();
        for part in self.parts() {
            if let Some(twice) = part.layers.iter().find(|name| !names.insert(name.as_str())) {
                let expected = "in one part of the plan";
                return Err(Error::Setting { what: "layers of sparsity overrides", found: twice.clone(), expected });
            }
        }
        for part in &self.overrides {
            if !part.overrides.is_empty() || part.method == Method::Step {
                let reason =
                    "STEP watches and freezes the second moments of one set of layers, that of the recipe's own method";
                return Err(conflict("`sparsity.override`", "the method `step` or another override", reason));
            }
            part.check_part()?;
        }
        Ok(())
    }

    fn check_part(&self) -> Result<()> {
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
        if self.method == Method::Activation {
            if let Some(name) = self.layers.iter().find(|name| !name.ends_with(".mlp.down")) {
                let expected = "the second layer of a feed-forward block, whose input the method `activation` prunes";
                return Err(Error::Setting { what: "sparsity.layers", found: name.clone(), expected });
            }
            if !matches!(self.rule, MaskRule::Transposable(_)) || self.precision != SparsePrecision::Activations {
                let reason = "inputs are pruned by transposable rules, and multiplied in the precision of activations";
                return Err(conflict("the method `activation`", "`mask` or `precision`", reason));
            }
        }
        if let Some(from) = self.two_of_four_from {
            if self.rule == MaskRule::SoftThreshold || self.mask_every == 0 || self.begin != SparseBegin::Step(begin) {
                let reason = "a stage in which groups keep three of four requires hard masks that change, and a step at which it begins";
                return Err(conflict("`two_of_four_from`", "this method", reason));
            }
            if from < begin || self.end.is_some_and(|end| from >= end) {
                let (found, expected) = (from.to_string(), "between the steps where sparsity begins and ends");
                return Err(Error::Setting { what: "the step from which groups keep two of four", found, expected });
            }
        }
        self.check_sparsifier()?;
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

    fn check_sparsifier(&self) -> Result<()> {
        let own = match (&self.sparsifier, self.method) {
            (Some(own), Method::Sparsifier) => own,
            (None, Method::Sparsifier) => {
                let (what, found) = ("the plan of the method `sparsifier`", "without masks".to_owned());
                return Err(Error::Setting { what, found, expected: "one with the rule of its masks" });
            }
            (Some(_), method) => {
                let reason = "only the method `sparsifier` has them";
                return Err(conflict("masks of a sparsifier", &format!("the method `{}`", method.name()), reason));
            }
            (None, _) => return Ok(()),
        };
        own.check()?;
        let is_plain = self.decay.is_none() && !self.observes && self.precision == SparsePrecision::Activations;
        if !is_plain || !matches!(self.weight_gradient, WeightGradient::Dense | WeightGradient::Masked) {
            let reason = "its layers are dense GEMMs under a mask";
            return Err(conflict("the method `sparsifier`", "decay, observed masks, 8-bit floats or MVUE", reason));
        }
        if own.criterion == SparsifierCriterion::Saliency && self.begin == SparseBegin::Step(0) {
            let reason = "they are chosen by the gradient of the step before";
            return Err(conflict("the criterion `saliency`", "masks from step 0", reason));
        }
        if own.in_place && self.weight_gradient == WeightGradient::Dense {
            let reason = "what is pruned stays zero, so its gradient is masked";
            return Err(conflict("masks in place", "a dense weight gradient", reason));
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
        let jumps = self.sparsifier.as_ref().is_some_and(|own| own.schedule.chooses_at(steps_done));
        jumps || (self.mask_every != 0 && steps_done.is_multiple_of(self.mask_every))
    }
}
