//! The choices that a sparse layer leaves to its user, shared by every engine.

use crate::{Error, Result, estimate::Estimator, select::Transposable};

/// How the mask of a [`SparseLinear`](super::SparseLinear) follows from its dense master weight.
/// [`Selector`](crate::Selector) is for other patterns and axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum MaskRule {
    /// The two largest magnitudes of each group of four along a row; ties to the lower index.
    #[default]
    Magnitude,
    /// 2:4 along rows and along columns at once, tile by tile, so that the transpose can be packed too.
    Transposable(Transposable),
    /// The mask of [`MaskRule::Magnitude`], with kept values reduced by the third largest magnitude and scaled (S-STE,
    /// Hu et al., NeurIPS 2024): [`Estimator::SoftThreshold`]. The scale is computed from the first master weight and
    /// then frozen.
    SoftThreshold,
    /// A mask that the user sets and changes.
    Given,
}

impl MaskRule {
    /// The rules that choose a mask by themselves: all but [`MaskRule::Given`].
    pub const CHOOSING: [MaskRule; 6] = [
        MaskRule::Magnitude,
        MaskRule::Transposable(Transposable::GreedyAbs),
        MaskRule::Transposable(Transposable::GreedySigned),
        MaskRule::Transposable(Transposable::Causal1122),
        MaskRule::Transposable(Transposable::Optimal),
        MaskRule::SoftThreshold,
    ];

    /// The name, as in `soft-threshold`; of a transposable rule, that of [`Transposable::name`].
    pub fn name(self) -> &'static str {
        match self {
            MaskRule::Magnitude => "magnitude",
            MaskRule::Transposable(rule) => rule.name(),
            MaskRule::SoftThreshold => "soft-threshold",
            MaskRule::Given => "given",
        }
    }
}

/// Which product computes the input gradient `dy · W`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum InputGradient {
    /// The fastest that the engine has for the mask: on a CPU the packed rows; on a GPU the packed transpose where the
    /// mask is transposable, and otherwise a dense GEMM with the unpacked weight.
    #[default]
    Automatic,
    /// The packed transpose, kept beside the packed rows. Requires a mask that is 2:4 along columns too.
    PackedTranspose,
}

/// What the weight gradient `dyᵀ · x` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum WeightGradient {
    /// Dense, to kept and pruned elements alike, so that pruned ones can grow back (straight-through estimator).
    #[default]
    Dense,
    /// Zero where the mask keeps nothing.
    Masked,
    /// `MVUE(dyᵀ) · x`: the output gradient replaced by its unbiased 2:4 estimate of least variance along tokens
    /// ([`Estimator::Mvue`]). The product is then sparse.
    Mvue,
    /// The same with [`Estimator::MvueApproximate`].
    MvueApproximate,
}

impl WeightGradient {
    /// The estimator that replaces the output gradient, if any.
    pub fn estimator(self, seed: u64) -> Option<Estimator> {
        match self {
            WeightGradient::Dense | WeightGradient::Masked => None,
            WeightGradient::Mvue => Some(Estimator::Mvue { seed }),
            WeightGradient::MvueApproximate => Some(Estimator::MvueApproximate { seed }),
        }
    }
}

/// What happens to the contents of a gradient's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Accumulate {
    /// They are overwritten: the first micro-step.
    #[default]
    Overwrite,
    /// The gradient is added to them: the micro-steps after it.
    Add,
}

/// The settings of a [`SparseLinear`](super::SparseLinear).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct SparseLinearSettings {
    /// How the mask is chosen.
    pub rule: MaskRule,
    /// Which product computes the input gradient.
    pub input_gradient: InputGradient,
    /// What the weight gradient is.
    pub weight_gradient: WeightGradient,
}

impl SparseLinearSettings {
    /// An error for settings that contradict each other.
    ///
    /// # Errors
    /// [`Error::NotTransposable`] for a packed transpose of a mask that is 2:4 along rows only.
    pub fn check(self) -> Result<()> {
        match (self.input_gradient, self.rule) {
            (InputGradient::PackedTranspose, MaskRule::Magnitude | MaskRule::SoftThreshold) => {
                Err(Error::NotTransposable)
            }
            _ => Ok(()),
        }
    }
}

/// The function that a [`SparseActivationLinear`](super::SparseActivationLinear) applies to its input before it prunes
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum InputActivation {
    /// None.
    #[default]
    Identity,
    /// `max(x, 0)²`: many of its values are zero already (Haziza et al., "Accelerating Transformer Inference and
    /// Training with 2:4 Activation Sparsity", 2025).
    SquaredRelu,
}

/// Which elements of the pruned input have a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum PrunedGradient {
    /// All, as if nothing had been pruned (straight-through estimator).
    #[default]
    Dense,
    /// Those that the mask keeps.
    Masked,
}

/// The settings of a [`SparseActivationLinear`](super::SparseActivationLinear).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SparseActivationSettings {
    /// How the mask of the input is chosen, tile by tile.
    pub rule: Transposable,
    /// What is applied to the input before.
    pub activation: InputActivation,
    /// Which elements of the input have a gradient.
    pub input_gradient: PrunedGradient,
}

impl Default for SparseActivationSettings {
    /// The greedy rule by magnitude, no activation, a dense gradient.
    fn default() -> Self {
        SparseActivationSettings {
            rule: Transposable::GreedyAbs,
            activation: InputActivation::default(),
            input_gradient: PrunedGradient::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_transpose_requires_a_transposable_mask() {
        let check = |rule| {
            let input_gradient = InputGradient::PackedTranspose;
            SparseLinearSettings { rule, input_gradient, ..Default::default() }.check()
        };
        for rule in [MaskRule::Magnitude, MaskRule::SoftThreshold] {
            assert!(matches!(check(rule), Err(Error::NotTransposable)));
        }
        assert!(check(MaskRule::Given).is_ok() && check(MaskRule::Transposable(Transposable::Optimal)).is_ok());
    }
}
