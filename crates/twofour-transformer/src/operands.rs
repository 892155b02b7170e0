//! Shapes and numbers that operations take.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The shape of a linear layer's operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinearShape {
    /// Rows of activations.
    pub tokens: usize,
    /// Output features.
    pub out_features: usize,
    /// Input features.
    pub in_features: usize,
}

/// A function of a feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nonlinearity {
    /// `max(x, 0)`.
    Relu,
    /// GELU, `x Φ(x)`.
    Gelu,
    /// GELU's approximation by tanh, `x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    TanhGelu,
    /// `x / (1 + exp(-x))`.
    Silu,
    /// `max(x, 0)²`.
    SquaredRelu,
}

/// A function of each element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Elementwise {
    /// That of a feed-forward block.
    Hidden(Nonlinearity),
    /// `cap · tanh(x / cap)`: scores that are bounded (Gemma 2).
    SoftCap(f32),
}

impl From<Nonlinearity> for Elementwise {
    fn from(function: Nonlinearity) -> Self {
        Elementwise::Hidden(function)
    }
}

/// The precision of the GEMMs of 2:4 layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SparsePrecision {
    /// That of activations.
    #[default]
    Activations,
    /// 8-bit floats: weights and inputs in e4m3, and, where masks are transposable, output gradients in e5m2. Each
    /// tensor has one scale, from its largest magnitude when it is rounded; that of zeros is 1. Input gradients under
    /// other masks and weight gradients are computed in the compute type. An engine without such GEMMs rounds operands
    /// and computes in the compute type.
    Fp8,
}

/// Which elements of a weight stay.
#[derive(Debug, Clone, Copy)]
pub enum Kept<'a, B> {
    /// So many of every group of four in a row, the largest magnitudes. Of equal magnitudes the lower index is kept; a
    /// NaN counts as the largest.
    OfFour(u32),
    /// Those of a mask of [`Kind::Index`](crate::engine::Kind::Index), `[rows, mask_words_of_row(cols)]`
    /// ([`mask_words_of_row`](crate::engine::mask_words_of_row)): bit `b` of word `j` of a row stands for column `32 j
    /// + b`, 1 where the element is kept.
    Mask(&'a B),
}

/// What happens to the second moment in an [`StepOperations::step`](crate::engine::StepOperations::step) step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SecondMoment {
    /// It follows the gradient.
    #[default]
    Moving,
    /// It follows the gradient, and the step returns the sum of the magnitudes of its change (STEP, Lu et al., ICML
    /// 2023).
    Watched,
    /// It follows the gradient, and the step returns the sum of the logarithms of those magnitudes, where zero counts
    /// as the least normal f32 (STEP's option 2).
    WatchedByLogarithm,
    /// It stays as it was after the step of this number, counted from 1, which also corrects its bias; `epsilon` is
    /// raised to the power 3/4 (STEP).
    Frozen {
        /// That step.
        at: u64,
    },
}

/// Decay of the elements that a 2:4 mask prunes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PrunedDecay {
    /// None.
    None,
    /// `strength · w` is added to the gradient of pruned elements after its scaling and before the moments.
    Gradient {
        /// The factor λ.
        strength: f32,
    },
    /// `learning_rate · strength · w` is taken off pruned elements, decoupled from the moments.
    Weight {
        /// The factor λ.
        strength: f64,
    },
    /// Pruned elements move by `(1 - share) · m + share · strength · sign(w)` in place of their first moment `m`, and
    /// the second moment of all elements follows what they move by in place of the gradient (AdamS of CAST, Huang et
    /// al., 2025).
    Moment {
        /// How far the decay has taken the place of the gradient, from 0 to 1.
        share: f32,
        /// The factor λ.
        strength: f32,
    },
}

/// The numbers of an AdamW step of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay of all elements; it is multiplied by the learning rate.
    pub weight_decay: f64,
    /// The number of this step, counted from 1.
    pub step: u64,
    /// The gradient is multiplied by this first: for clipping, and to undo loss scaling.
    pub gradient_scale: f32,
    /// What happens to the second moment.
    pub second_moment: SecondMoment,
    /// Decay of the elements that the parameter's mask prunes; ignored where there is no mask.
    pub pruned_decay: PrunedDecay,
}

/// The numbers of a step of gradient descent with momentum of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdStep {
    /// Learning rate.
    pub learning_rate: f64,
    /// The share of the momentum that a step keeps.
    pub momentum: f64,
    /// Weight decay of all elements, added to the gradient.
    pub weight_decay: f64,
    /// The gradient is multiplied by this first: for clipping, and to undo loss scaling.
    pub gradient_scale: f32,
    /// Decay of the elements that the parameter's mask prunes; ignored where there is no mask.
    pub pruned_decay: PrunedDecay,
}

/// An optimizer's step of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptimizerStep {
    /// AdamW: `g ← g · gradient_scale` (plus pruned decay), `m ← β₁ m + (1 - β₁) g`, `v ← β₂ v + (1 - β₂) g²`,
    /// `w ← w (1 - η · weight_decay) - η m̂ / (√v̂ + ε)`, in f32 in this order.
    AdamW(AdamWStep),
    /// Gradient descent with momentum: `g ← g · gradient_scale + weight_decay · w` (plus pruned decay), `m ← momentum ·
    /// m + g`, `w ← w - η m`, in f32 in this order. The numbers are arguments of the launch, which
    /// [`StepOperations::repeat`](crate::engine::StepOperations::repeat) would repeat.
    Sgd(SgdStep),
}

/// A parameter, its gradient and its moments, as [`StepOperations::step`](crate::engine::StepOperations::step) updates
/// them: each of [`Kind::Wide`](crate::engine::Kind::Wide) but the copy.
#[derive(Debug)]
pub struct ParameterState<'a, B, S> {
    /// The master weight.
    pub master: &'a mut B,
    /// The gradient.
    pub gradient: &'a B,
    /// The first moment; the momentum of gradient descent.
    pub first: &'a mut B,
    /// The second moment, which gradient descent does not have.
    pub second: Option<&'a mut B>,
    /// The copy in the compute type, written in the same pass.
    pub copy: Option<&'a mut B>,
    /// The 2:4 layer whose mask says what is pruned.
    pub sparse: Option<&'a S>,
}

/// Returns the second moment of a parameter that AdamW updates.
pub(crate) fn expect_second<'a, B>(engine: &'static str, second: Option<&'a mut B>) -> Result<&'a mut B> {
    second.ok_or_else(|| Error::Unsupported {
        engine,
        what: "AdamW without second moments".to_owned(),
        remedy: "go on with the optimizer that training began with",
    })
}

/// An error unless a gradient's own scale is 1: a guard has the factor.
pub(crate) fn expect_unscaled(engine: &'static str, gradient_scale: f32) -> Result<()> {
    if gradient_scale == 1.0 {
        return Ok(());
    }
    let what = format!("a gradient scale of {gradient_scale} beside the factor of a step's guard");
    Err(Error::Unsupported { engine, what, remedy: "set the scale to 1" })
}

/// Refuses a decay in the place of moments.
pub(crate) fn expect_no_moment_decay(engine: &'static str, decay: PrunedDecay) -> Result<()> {
    match decay {
        PrunedDecay::Moment { .. } => Err(Error::Unsupported {
            engine,
            what: "decay of pruned elements in the place of their moments (AdamS)".to_owned(),
            remedy: "train with AdamW on a CPU, or choose another decay",
        }),
        _ => Ok(()),
    }
}

/// A 2:4 layer after the update of its master weight, as
/// [`StepOperations::refresh`](crate::engine::StepOperations::refresh) takes it.
#[derive(Debug)]
pub struct LayerRefresh<'a, B, S> {
    /// The layer's name, for errors.
    pub name: &'a str,
    /// The layer.
    pub layer: &'a mut S,
    /// The master weight, [`Kind::Wide`](crate::engine::Kind::Wide).
    pub master: &'a B,
    /// Whether its mask is selected; otherwise it is packed under the mask as it is.
    pub selects_mask: bool,
}

/// What [`StepOperations::judge`](crate::engine::StepOperations::judge) multiplies gradients by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepLimits {
    /// The largest norm of all gradients together; no limit if it is 0 or infinite.
    pub clip_norm: f64,
    /// The factor that the gradients carry, and the loss does not.
    pub loss_scale: f32,
}

/// What [`StepOperations::findings`](crate::engine::StepOperations::findings) reads after a step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepFindings {
    /// The loss that [`StepOperations::judge`](crate::engine::StepOperations::judge) was given.
    pub loss: f64,
    /// The norm of all gradients together, without the loss scale.
    pub norm: f64,
    /// Mask elements that the last selection changed, for each layer.
    pub flips: Vec<u64>,
}

impl StepFindings {
    /// Whether loss and norm are finite; the step is skipped where they are not.
    pub fn is_finite(&self) -> bool {
        self.loss.is_finite() && self.norm.is_finite()
    }
}
