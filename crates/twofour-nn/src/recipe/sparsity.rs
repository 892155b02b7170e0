//! The sparsity of a recipe: which layers are 2:4, when, and how they are trained.

use serde::{Deserialize, Serialize};

use super::{
    SparsifierSettings,
    reader::{Named, name_of},
};
use crate::linear::SparsePrecision;

/// A named method. Each sets the fields of [`SparsitySettings`] that a recipe leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Method {
    /// No layer is 2:4.
    #[default]
    Dense,
    /// The mask of the first weights, kept; the gradient is masked.
    Fixed,
    /// Hard threshold with the straight-through estimator.
    Ste,
    /// The straight-through estimator with decay of pruned weights (Zhou et al., ICLR 2021).
    SrSte,
    /// Transposable masks, masked decay on gradients, MVUE weight gradients, the last sixth dense (FST; Hu et al., ICML 2024).
    Fst,
    /// Soft threshold with a frozen scale (S-STE; Hu et al., NeurIPS 2024).
    SSte,
    /// Dense until variances have settled, then hard threshold with frozen variances (STEP; Lu et al., ICML 2023).
    Step,
    /// Hard threshold in two stages: three of four, then two of four (structure decay; Kao et al., "Training Recipe for N:M Structured Sparsity with Decaying
    /// Pruning Mask", 2022).
    Gradual,
    /// Squared ReLU in feed-forward blocks, pruned to 2:4 at each pass; weights are dense (Haziza et al., "Accelerating Transformer Inference and Training with 2:4
    /// Activation Sparsity", 2025).
    Activation,
    /// Masks of any pattern, whose level follows a schedule, in dense GEMMs: [`SparsifierSettings`].
    Sparsifier,
}

impl Method {
    /// The name in a recipe.
    pub fn name(self) -> &'static str {
        name_of(self)
    }
}

impl Named for Method {
    const ALL: &'static [(&'static str, Self)] = &[
        ("dense", Method::Dense),
        ("fixed", Method::Fixed),
        ("ste", Method::Ste),
        ("sr-ste", Method::SrSte),
        ("fst", Method::Fst),
        ("s-ste", Method::SSte),
        ("step", Method::Step),
        ("gradual", Method::Gradual),
        ("activation", Method::Activation),
        ("sparsifier", Method::Sparsifier),
    ];
}

/// Where the decay of pruned weights is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DecayTarget {
    /// To the gradient after clipping, so that it passes through the optimizer's moments.
    Gradient,
    /// To the weight, decoupled from the moments.
    Weight,
}

impl DecayTarget {
    /// The name in a recipe.
    pub fn name(self) -> &'static str {
        name_of(self)
    }
}

impl Named for DecayTarget {
    const ALL: &'static [(&'static str, Self)] =
        &[("gradient", DecayTarget::Gradient), ("weight", DecayTarget::Weight)];
}

/// The strength of the decay of pruned weights, λ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DecayStrength {
    /// This number.
    Given(f64),
    /// Found by trial runs, from flip rates: [`DecaySearch`](crate::train::DecaySearch).
    Searched(Searched),
}

/// The word for a strength that is found by trial runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Searched {
    /// `"auto"`.
    Auto,
}

impl DecayStrength {
    /// The number, where one is given.
    pub fn strength(self) -> Option<f64> {
        match self {
            DecayStrength::Given(strength) => Some(strength),
            DecayStrength::Searched(_) => None,
        }
    }
}

/// The mean of second moments' changes by which STEP decides that they have settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SwitchMean {
    /// The mean of magnitudes (option 1 of the paper).
    #[default]
    Arithmetic,
    /// The exponential of the mean of their logarithms (option 2).
    Geometric,
}

impl Named for SwitchMean {
    const ALL: &'static [(&'static str, Self)] =
        &[("arithmetic", SwitchMean::Arithmetic), ("geometric", SwitchMean::Geometric)];
}

fn is_activations(precision: &SparsePrecision) -> bool {
    *precision == SparsePrecision::Activations
}

impl Named for SparsePrecision {
    const ALL: &'static [(&'static str, Self)] =
        &[("activations", SparsePrecision::Activations), ("fp8", SparsePrecision::Fp8)];
}

/// Whose settings a method has where a recipe says nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
pub enum Defaults {
    /// Those of this project.
    #[default]
    #[serde(rename = "twofour")]
    Own,
    /// Those of the 2by4-pretrain toolkit, the implementation of FST, S-STE and STEP by two papers' authors.
    #[serde(rename = "2by4-pretrain")]
    Toolkit,
}

impl Defaults {
    fn is_own(&self) -> bool {
        *self == Defaults::Own
    }
}

impl Named for Defaults {
    const ALL: &'static [(&'static str, Self)] = &[("twofour", Defaults::Own), ("2by4-pretrain", Defaults::Toolkit)];
}

/// Which layers are 2:4, when, and how they are trained. Absent fields are those of the method.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SparsitySettings {
    /// The method.
    pub method: Method,
    /// Names of linear layers, with `*`; those of feed-forward blocks if absent.
    pub layers: Option<Vec<String>>,
    /// The rule of masks: `magnitude`, `greedy`, `greedy-signed`, `causal1122`, `optimal` or `soft-threshold`.
    pub mask: Option<String>,
    /// Optimizer steps between two choices of the mask.
    pub mask_every: Option<u64>,
    /// The weight gradient: `dense`, `masked`, `mvue` or `mvue-approximate`.
    pub weight_gradient: Option<String>,
    /// The factor of the decay of pruned weights, λ.
    pub decay: Option<DecayStrength>,
    /// The strengths that trial runs compare where `decay` is `"auto"`.
    pub decay_grid: Option<Vec<f64>>,
    /// Optimizer steps of each trial run.
    pub decay_trial_steps: Option<u64>,
    /// Where that decay is added.
    pub decay_target: Option<DecayTarget>,
    /// The share of all steps after which layers become 2:4; with [`Method::Step`], after which they may.
    pub begin: Option<f64>,
    /// The share of all steps after which layers become dense again.
    pub end: Option<f64>,
    /// The share of all steps after which groups keep two of four; from `begin` until then they keep three.
    pub two_of_four_from: Option<f64>,
    /// With [`Method::Step`], the share of all steps after which layers are 2:4 at the latest.
    pub switch_latest: Option<f64>,
    /// With [`Method::Step`], the mean of changes by which it switches.
    pub switch_mean: Option<SwitchMean>,
    /// The precision of the GEMMs of 2:4 layers.
    #[serde(skip_serializing_if = "is_activations")]
    pub precision: SparsePrecision,
    /// Whose settings hold where this recipe says nothing.
    #[serde(skip_serializing_if = "Defaults::is_own")]
    pub defaults: Defaults,
    /// Whether the flip rate is measured at every step, whatever the layers' form and however rarely masks are chosen.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub observe: bool,
    /// The masks of [`Method::Sparsifier`], of this section and of overrides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sparsifier: Option<SparsifierSettings>,
    /// Layers with settings of their own.
    #[serde(rename = "override", skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<LayerOverride>,
}

/// Settings of some layers, in place of those of the section. Absent fields are those of the section, or, with another method, those of that method.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LayerOverride {
    /// Names of linear layers, with `*`.
    pub layers: Vec<String>,
    /// The method; [`Method::Dense`] takes layers out.
    pub method: Option<Method>,
    /// As [`SparsitySettings::mask`].
    pub mask: Option<String>,
    /// As [`SparsitySettings::mask_every`].
    pub mask_every: Option<u64>,
    /// As [`SparsitySettings::weight_gradient`].
    pub weight_gradient: Option<String>,
    /// As [`SparsitySettings::decay`], but always a number.
    pub decay: Option<f64>,
    /// As [`SparsitySettings::decay_target`].
    pub decay_target: Option<DecayTarget>,
    /// As [`SparsitySettings::begin`].
    pub begin: Option<f64>,
    /// As [`SparsitySettings::end`].
    pub end: Option<f64>,
    /// As [`SparsitySettings::two_of_four_from`].
    pub two_of_four_from: Option<f64>,
    /// As [`SparsitySettings::sparsifier`], over it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sparsifier: Option<SparsifierSettings>,
}

impl LayerOverride {
    /// The settings of these layers, over those of the section.
    pub fn over(&self, section: &SparsitySettings) -> SparsitySettings {
        let method = self.method.unwrap_or(section.method);
        let mut base = SparsitySettings { overrides: vec![], ..section.clone() };
        if method != section.method {
            let SparsitySettings { observe, defaults, precision, .. } = *section;
            let sparsifier = base.sparsifier;
            base = SparsitySettings { method, observe, defaults, precision, sparsifier, ..Default::default() };
        }
        if let (Some(own), Some(section)) = (&self.sparsifier, &base.sparsifier)
            && own.has_other_times(section)
        {
            (base.begin, base.mask_every) = (None, None);
        }
        SparsitySettings {
            layers: Some(self.layers.clone()),
            mask: self.mask.clone().or(base.mask),
            mask_every: self.mask_every.or(base.mask_every),
            weight_gradient: self.weight_gradient.clone().or(base.weight_gradient),
            decay: self.decay.map(DecayStrength::Given).or(base.decay),
            decay_target: self.decay_target.or(base.decay_target),
            begin: self.begin.or(base.begin),
            end: self.end.or(base.end),
            two_of_four_from: self.two_of_four_from.or(base.two_of_four_from),
            sparsifier: match (&self.sparsifier, &base.sparsifier) {
                (Some(own), Some(section)) => Some(own.over(section)),
                (Some(own), None) => Some(own.clone()),
                (None, _) => base.sparsifier.clone().filter(|_| method == Method::Sparsifier),
            },
            ..base
        }
    }
}
