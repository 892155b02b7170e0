//! The sparsity of a recipe: which layers are 2:4, when, and how they are trained.

use serde::{Deserialize, Serialize};

use super::reader::{Named, name_of};

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
    pub decay: Option<f64>,
    /// Where that decay is added.
    pub decay_target: Option<DecayTarget>,
    /// The share of all steps after which layers become 2:4; with [`Method::Step`], after which they may.
    pub begin: Option<f64>,
    /// The share of all steps after which layers become dense again.
    pub end: Option<f64>,
}
