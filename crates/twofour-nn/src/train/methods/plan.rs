//! The plan of a run's sparsity.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use twofour::layer::{InputGradient, MaskRule, SparseLinearSettings, WeightGradient};

use super::{DecayTarget, Method, SparsifierPlan, SwitchMean, conflict};
use crate::{
    Error, Result,
    engine::PrunedDecay,
    linear::{LayerForm, SparsePrecision},
    settings::{OwnSettings, named},
};

/// Decay of pruned elements of 2:4 weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Decay {
    /// The factor λ.
    pub strength: f64,
    /// The place where it is added.
    pub target: DecayTarget,
}

impl Decay {
    /// The default of recipes: the papers' value for AdamW and weights of deviation 0.02, on gradients.
    pub const PUBLISHED: Self = Decay { strength: 2e-4, target: DecayTarget::Gradient };
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
    /// Once the second moments of their weights have settled (STEP, Lu et al., ICML 2023: the mean of the change over
    /// `1 / (1 - β₂)` steps is below ε; [`SparsityPlan::switch_mean`]): after step `earliest` and at the latest after
    /// step `latest`. From then on the second moments are frozen.
    Settled {
        /// Steps that are dense in any case.
        earliest: u64,
        /// The most steps that are dense.
        latest: u64,
    },
}

/// Which layers are 2:4, when, and how they are trained.
///
/// [`SparsityPlan::new`] makes it from a recipe's [`SparsitySettings`](super::SparsitySettings); the fields are public,
/// so that a program can also write its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SparsityPlan {
    /// The method that the plan came from.
    pub method: Method,
    /// Full names of the linear layers that are 2:4 while the plan is in force, such as `blocks.0.mlp.up`; none if
    /// dense.
    pub layers: Vec<String>,
    /// The rule of masks.
    #[serde(with = "named")]
    pub rule: MaskRule,
    /// The weight gradient.
    #[serde(with = "named")]
    pub weight_gradient: WeightGradient,
    /// Optimizer steps between two selections of the mask; 0 keeps the first mask.
    pub mask_every: u64,
    /// Decay of pruned elements.
    pub decay: Option<Decay>,
    /// When layers become 2:4.
    pub begin: SparseBegin,
    /// The step, counted from 0, before which layers become dense again; never if absent.
    pub end: Option<u64>,
    /// The step, counted from 0, from which groups keep two of four; from `begin` until then they keep three (3:4). Two
    /// from `begin` on if absent.
    #[serde(default)]
    pub two_of_four_from: Option<u64>,
    /// The precision of the GEMMs of 2:4 layers.
    #[serde(default)]
    pub precision: SparsePrecision,
    /// The mean of second moments' changes by which STEP switches.
    #[serde(default)]
    pub switch_mean: SwitchMean,
    /// Whether the mask that the rule would select is selected after every step for each of the layers, whatever their
    /// form, so that its flip rate can be compared with that of another run. Nothing computes with it.
    #[serde(default)]
    pub observes: bool,
    /// Numbers of settings that the method alone has.
    #[serde(default, skip_serializing_if = "OwnSettings::is_empty")]
    pub own: OwnSettings,
    /// The masks of [`Method::SPARSIFIER`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sparsifier: Option<SparsifierPlan>,
    /// Layers with plans of their own. Their `overrides` are empty, and no layer is in two parts.
    #[serde(default)]
    pub overrides: Vec<SparsityPlan>,
}

impl SparsityPlan {
    /// λ of FST for GPT-2 124M and 774M in the 2by4-pretrain toolkit.
    pub const TOOLKIT_DECAY: f64 = 6e-5;

    /// Optimizer steps between two masks where masks are transposable and a recipe says nothing.
    pub const TRANSPOSABLE_MASK_EVERY: u64 = 40;

    /// A plan in which no layer is 2:4.
    pub fn dense() -> Self {
        SparsityPlan {
            method: Method::DENSE,
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
            own: OwnSettings::default(),
            sparsifier: None,
            overrides: vec![],
        }
    }

    /// What a method does with these layers where a recipe says nothing else, in a run of `steps` optimizer steps.
    pub fn of_method(method: Method, layers: Vec<String>, steps: u64) -> Self {
        let mut plan = SparsityPlan { method, layers, ..Self::dense() };
        method.defaults(&mut plan, steps);
        plan
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
            if !part.overrides.is_empty() || part.method.watches() {
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
        if let Some(from) = self.two_of_four_from {
            if self.rule == MaskRule::SoftThreshold || self.mask_every == 0 || self.begin != SparseBegin::Step(begin) {
                let reason = "a stage in which groups keep three of four requires hard masks that change, and a step \
                              at which it begins";
                return Err(conflict("`two_of_four_from`", "this method", reason));
            }
            if from < begin || self.end.is_some_and(|end| from >= end) {
                let (found, expected) = (from.to_string(), "between the steps where sparsity begins and ends");
                return Err(Error::Setting { what: "the step from which groups keep two of four", found, expected });
            }
        }
        if self.sparsifier.is_some() && self.method != Method::SPARSIFIER {
            let reason = "only the method `sparsifier` has them";
            let method = format!("the method `{}`", self.method.name());
            return Err(conflict("masks of a sparsifier", &method, reason));
        }
        self.method.check_plan(self)?;
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
        let is_due = self.mask_every != 0 && steps_done.is_multiple_of(self.mask_every);
        is_due || self.method.chooses_at(self, steps_done)
    }

    /// The form of this part's layers in the step of that number, counted from 0. `has_settled` says whether STEP has
    /// switched.
    pub fn form_at(&self, step: u64, has_settled: bool) -> LayerForm {
        let has_begun = match self.begin {
            SparseBegin::Step(begin) => step >= begin,
            SparseBegin::Settled { .. } => has_settled,
        };
        if !has_begun || self.end.is_some_and(|end| step >= end) {
            LayerForm::Dense
        } else if self.two_of_four_from.is_some_and(|from| step < from) && !self.is_dense() {
            LayerForm::ThreeOfFour
        } else {
            self.method.form_at(self, step)
        }
    }

    /// Whether the layers of this part are dense in all steps.
    pub fn is_dense(&self) -> bool {
        self.method.sparse_form() == LayerForm::Dense
    }

    /// The plan itself and its overrides; no layer is in two of them.
    pub fn parts(&self) -> impl Iterator<Item = &SparsityPlan> {
        std::iter::once(self).chain(&self.overrides)
    }

    /// The part that a layer belongs to.
    pub fn part_of(&self, layer: &str) -> Option<&SparsityPlan> {
        self.parts().find(|part| part.layers.iter().any(|name| name == layer))
    }
}
