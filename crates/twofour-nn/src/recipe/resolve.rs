//! What a method means: every choice of [`SparsitySettings`] made.

use serde::Serialize;
use twofour::{
    layer::{InputGradient, MaskRule, SparseLinearSettings, WeightGradient},
    select::Transposable,
};

use super::{
    DecayTarget, Method, Recipe, SparsitySettings,
    reader::{Named, name_of},
};

impl Named for MaskRule {
    const ALL: &'static [(&'static str, Self)] = &[
        ("magnitude", MaskRule::Magnitude),
        ("greedy", MaskRule::Transposable(Transposable::GreedyAbs)),
        ("greedy-signed", MaskRule::Transposable(Transposable::GreedySigned)),
        ("causal1122", MaskRule::Transposable(Transposable::Causal1122)),
        ("optimal", MaskRule::Transposable(Transposable::Optimal)),
        ("soft-threshold", MaskRule::SoftThreshold),
    ];
}

impl Named for WeightGradient {
    const ALL: &'static [(&'static str, Self)] = &[
        ("dense", WeightGradient::Dense),
        ("masked", WeightGradient::Masked),
        ("mvue", WeightGradient::Mvue),
        ("mvue-approximate", WeightGradient::MvueApproximate),
    ];
}

pub(super) fn mask_name(rule: MaskRule) -> String {
    name_of(rule).to_owned()
}

pub(super) fn gradient_name(gradient: WeightGradient) -> String {
    name_of(gradient).to_owned()
}

/// Published strength of the decay of SR-STE.
const SR_STE_DECAY: f64 = 2e-4;

/// Published strength of FST's decay for GPT-2 with 124 M parameters. It must be tuned for other models.
const FST_DECAY: f64 = 6e-5;

/// Steps between two masks of FST.
const FST_MASK_EVERY: u64 = 40;

/// The share of FST's steps that are 2:4.
const FST_END: f64 = 5.0 / 6.0;

/// The shares of all steps between which STEP may switch to 2:4.
const STEP_BOUNDS: [f64; 2] = [0.1, 0.5];

/// When layers become 2:4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SparseBegin {
    /// Before the step of this number, counted from 0.
    Step(u64),
    /// When the optimizer's variances have settled (STEP), between two steps.
    Settled {
        /// Not before this step.
        earliest: u64,
        /// At the latest before this step.
        latest: u64,
    },
}

/// How and when the 2:4 layers of a recipe are trained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ResolvedSparsity {
    /// The method.
    pub method: Method,
    /// Mask, input gradient and weight gradient.
    pub settings: SparseLinearSettings,
    /// Optimizer steps between two choices of the mask; `None` for a mask that is never chosen again.
    pub mask_every: Option<u64>,
    /// Decay of pruned weights: where it is added, and its factor λ.
    pub decay: Option<(DecayTarget, f64)>,
    /// When layers become 2:4.
    pub begin: SparseBegin,
    /// The step before which layers become dense again; that after the last one for never.
    pub end: u64,
}

/// The mask rule of a method.
pub(super) fn mask_of(settings: &SparsitySettings) -> MaskRule {
    let own = match settings.method {
        Method::Fst => MaskRule::Transposable(Transposable::Optimal),
        Method::SSte => MaskRule::SoftThreshold,
        Method::Dense | Method::Fixed | Method::Ste | Method::SrSte | Method::Step => MaskRule::Magnitude,
    };
    named(settings.mask.as_deref()).unwrap_or(own)
}

/// The weight gradient of a method.
pub(super) fn gradient_of(settings: &SparsitySettings) -> WeightGradient {
    let own = match settings.method {
        Method::Fixed => WeightGradient::Masked,
        Method::Fst | Method::SSte => WeightGradient::Mvue,
        Method::Dense | Method::Ste | Method::SrSte | Method::Step => WeightGradient::Dense,
    };
    named(settings.weight_gradient.as_deref()).unwrap_or(own)
}

fn named<T: Named>(name: Option<&str>) -> Option<T> {
    T::ALL.iter().find(|(known, _)| Some(*known) == name).map(|(_, value)| *value)
}

/// The first and the last step of a share of the run.
pub(super) fn step_of(share: f64, steps: u64) -> u64 {
    ((share * steps as f64).round() as u64).min(steps)
}

impl Recipe {
    /// How and when the 2:4 layers are trained; `None` for the method `dense`.
    pub fn resolve_sparsity(&self) -> Option<ResolvedSparsity> {
        let (settings, steps) = (&self.sparsity, self.training.steps);
        let decay = |strength| {
            let target = settings.decay_target.unwrap_or(DecayTarget::Gradient);
            Some((target, settings.decay.unwrap_or(strength)))
        };
        let (mask_every, decay) = match settings.method {
            Method::Dense => return None,
            Method::Fixed => (None, None),
            Method::Ste => (Some(settings.mask_every.unwrap_or(1)), None),
            Method::SrSte => (Some(settings.mask_every.unwrap_or(1)), decay(SR_STE_DECAY)),
            Method::Fst => (Some(settings.mask_every.unwrap_or(FST_MASK_EVERY.min(steps))), decay(FST_DECAY)),
            Method::SSte | Method::Step => (Some(1), None),
        };
        let begin = match settings.method {
            Method::Step => SparseBegin::Settled {
                earliest: step_of(settings.earliest_switch.unwrap_or(STEP_BOUNDS[0]), steps),
                latest: step_of(settings.latest_switch.unwrap_or(STEP_BOUNDS[1]), steps),
            },
            _ => SparseBegin::Step(step_of(settings.begin.unwrap_or(0.0), steps)),
        };
        let own_end = if settings.method == Method::Fst { FST_END } else { 1.0 };
        let layer = SparseLinearSettings {
            rule: mask_of(settings),
            input_gradient: InputGradient::Automatic,
            weight_gradient: gradient_of(settings),
        };
        let end = step_of(settings.end.unwrap_or(own_end), steps);
        Some(ResolvedSparsity { method: settings.method, settings: layer, mask_every, decay, begin, end })
    }
}
