//! The methods of sparse training, a file for each: what mask when, which gradients, which decay, and the recipe's
//! settings.
//!
//! | item | |
//! |---|---|
//! | [`TrainingMethod`] | what a method says about itself |
//! | [`METHODS`] | all methods: a new one is a file beside this one, and its line in the list |
//! | [`SparsitySettings`] | the settings of a recipe |
//! | [`SparsityPlan`] | what they mean: every choice made, in steps of the run |
//! | [`HostMasks`] | masks that a method chooses itself, on the host |

mod check;
mod masks;
mod plan;
mod resolve;
mod settings;
#[cfg(test)]
mod tests;

use std::{fmt, hash};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use twofour::layer::WeightGradient;

use crate::{
    Result,
    engine::PrunedDecay,
    linear::{LayerForm, Masking},
    settings::{Mistakes, Named, OwnSetting},
};
pub use adapters::{AdapterFactors, AdapterKind};
pub use check::CheckedPart;
pub(crate) use check::{check_override, check_part, check_plan};
pub use masks::{HostMasks, MaskedLayer, Merged, Rounded, WeightOnHost};
pub use plan::{Decay, SparseBegin, SparsityPlan};
pub use settings::{DecayStrength, DecayTarget, Defaults, LayerOverride, Searched, SparsitySettings};
pub use sparsifier::{
    BlockNorm, LevelSchedule, LevelScheduleKind, PatternText, SparsifierCriterion, SparsifierKind, SparsifierPlan,
    SparsifierRule, SparsifierSettings,
};
pub use step::SwitchMean;

/// The layers of feed-forward blocks.
const FEED_FORWARD: &str = "blocks.*.mlp.*";

/// The rules of masks that a method has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rules {
    /// Rules that choose kept elements and leave their values: all but the soft threshold.
    Hard,
    /// Rules whose masks are 2:4 along columns too.
    Transposable,
    /// The soft threshold.
    Soft,
}

/// A method of sparse training. What is not overridden is that of plain straight-through training: a new mask of the
/// largest magnitudes after every step, dense weight gradients, no decay, 2:4 in all steps.
pub trait TrainingMethod: Sync {
    /// Changes the plan of straight-through training to what the method does where a recipe says nothing, in a run of
    /// `steps` optimizer steps.
    fn defaults(&self, _plan: &mut SparsityPlan, _steps: u64) {}

    /// Changes the defaults to those of the 2by4-pretrain toolkit, where that has the method and other ones.
    fn toolkit_defaults(&self, _plan: &mut SparsityPlan) {}

    /// The settings that it has of those that only some methods have: `decay`, `decay_target`, `decay_grid`,
    /// `decay_trial_steps`, `two_of_four_from` and `defaults`.
    fn has(&self) -> &'static [&'static str] {
        &[]
    }

    /// The settings that other methods have and this one does not, with the reason.
    fn excludes(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// The settings that it alone has.
    fn own(&self) -> &'static [OwnSetting] {
        &[]
    }

    /// Whether the mask of the plan's rule can be observed, whatever the layers' form.
    fn can_observe(&self) -> bool {
        !self.excludes().iter().any(|(key, _)| *key == "observe")
    }

    /// Its rules of masks.
    fn rules(&self) -> Rules {
        Rules::Hard
    }

    /// The reason why the method refuses a kind of weight gradient; none if it takes it.
    fn refuses(&self, gradient: WeightGradient) -> Option<&'static str> {
        let masked = "pruned elements would never grow back; use the method \"fixed\"";
        (gradient == WeightGradient::Masked).then_some(masked)
    }

    /// Notes what else is wrong with the settings of a part of a recipe.
    fn check(&self, _part: &CheckedPart<'_>, _m: &mut Mistakes) {}

    /// When its layers become sparse, by the settings, in a run of `steps` steps. `default` is that of
    /// [`TrainingMethod::defaults`].
    fn begin(&self, settings: &SparsitySettings, default: SparseBegin, steps: u64) -> SparseBegin {
        match settings.begin {
            Some(share) => SparseBegin::Step(step_of(share, steps)),
            None => default,
        }
    }

    /// Brings the settings that it alone has to the plan, after the others.
    ///
    /// # Errors
    /// Values out of range.
    fn resolve(&self, _plan: &mut SparsityPlan, _settings: &SparsitySettings, _steps: u64) -> Result<()> {
        Ok(())
    }

    /// Checks a plan's settings against each other.
    ///
    /// # Errors
    /// Values out of range, and settings that exclude each other.
    fn check_plan(&self, _plan: &SparsityPlan) -> Result<()> {
        Ok(())
    }

    /// The form of its layers while they are sparse.
    fn sparse_form(&self) -> LayerForm {
        LayerForm::TwoOfFour
    }

    /// The form of its layers in a step between the plan's beginning and its end, counted from 0.
    fn form_at(&self, _plan: &SparsityPlan, _step: u64) -> LayerForm {
        self.sparse_form()
    }

    /// The layers that it is for where a recipe names none: a name with `*`.
    fn layers(&self) -> &'static str {
        FEED_FORWARD
    }

    /// Whether it is for no other layers than [`TrainingMethod::layers`], and why.
    fn only_these_layers(&self) -> Option<&'static str> {
        None
    }

    /// The reason why the method is not for a model, which may have gated feed-forward blocks or be an encoder; none if
    /// it is.
    fn unsuitable(&self, _has_gates: bool, _is_encoder: bool) -> Option<&'static str> {
        None
    }

    /// Whether it keeps the zeros of a model that training starts from.
    fn keeps_zeros(&self) -> bool {
        false
    }

    /// Whether nothing of the model trains: no parameter of it, in layers or outside of them.
    fn freezes_model(&self) -> bool {
        false
    }

    /// The elements that train beside the weight of a layer of that shape.
    fn factor_elements(&self, _plan: &SparsityPlan, _outputs: usize, _inputs: usize) -> usize {
        0
    }

    /// Whether it watches second moments of one set of layers, so that it is no method of overrides and requires AdamW.
    fn watches(&self) -> bool {
        false
    }

    /// What an optimizer step does to the weights that the present mask prunes, in the step of that number, counted
    /// from 0.
    fn pruned_decay(&self, plan: &SparsityPlan, _step: u64) -> PrunedDecay {
        plan.decay.map_or(PrunedDecay::None, PrunedDecay::from)
    }

    /// Whether it requires the second moments of AdamW, and what for.
    fn requires_adamw(&self) -> Option<&'static str> {
        self.watches().then_some("it switches by second moments")
    }

    /// Whether the zeros of a 2:4 model that training starts from get the weights of its teacher, since their places
    /// may be kept later.
    fn fills_zeros(&self) -> bool {
        false
    }

    /// Whether the weights of its layers are trained in a step.
    fn trains_weights(&self, _plan: &SparsityPlan, _step: u64) -> bool {
        true
    }

    /// What happens to the weights that its masks prune where its form is [`LayerForm::Masked`].
    fn masking(&self, _plan: &SparsityPlan) -> Masking {
        Masking::StraightThrough
    }

    /// Whether its layers compute with rounded weights, for which they hold a scale of f32 for each element.
    fn rounds_weights(&self) -> bool {
        false
    }

    /// The masks of all layers whose form is [`LayerForm::Masked`] under this method, each with its part of the plan.
    /// `seed` is that of the run.
    ///
    /// # Errors
    /// Numbers out of range.
    fn masks(&self, _layers: &[MaskedLayer<'_>], _seed: u64) -> Result<Option<Box<dyn HostMasks>>> {
        Ok(None)
    }

    /// Whether masks are chosen anew after so many steps of a run, however rarely they are otherwise.
    fn chooses_at(&self, _plan: &SparsityPlan, _steps_done: u64) -> bool {
        false
    }

    /// What its masks prune, in words, where they are not 2:4 by the plan's rule.
    fn prunes(&self, _plan: &SparsityPlan) -> Option<String> {
        None
    }
}

/// One of [`METHODS`]. It is written as its name.
#[derive(Clone, Copy)]
pub struct Method {
    name: &'static str,
    method: &'static dyn TrainingMethod,
}

/// The files of methods, each with the name of its constant.
macro_rules! methods {
    ($($file:ident => $constant:ident,)*) => {
        $(mod $file;)*

        impl Method {
            $(
                #[doc = concat!("The method of `methods/", stringify!($file), "`.")]
                pub const $constant: Method = $file::METHOD;
            )*
        }

        /// All methods.
        pub const METHODS: &[Method] = &[$(Method::$constant,)*];

        impl Named for Method {
            const ALL: &'static [(&'static str, Self)] = &[$((Method::$constant.name, Method::$constant),)*];
        }
    };
}

methods! {
    dense => DENSE,
    fixed => FIXED,
    quantized => QUANTIZED,
    ste => STE,
    sr_ste => SR_STE,
    fst => FST,
    s_ste => S_STE,
    step => STEP,
    gradual => GRADUAL,
    activation => ACTIVATION,
    sparsifier => SPARSIFIER,
    learnable => LEARNABLE,
    adams => ADAMS,
    adapters => ADAPTERS,
}

impl Method {
    /// The name in a recipe.
    pub const fn name(self) -> &'static str {
        self.name
    }
}

impl std::ops::Deref for Method {
    type Target = dyn TrainingMethod;

    fn deref(&self) -> &Self::Target {
        self.method
    }
}

impl Default for Method {
    fn default() -> Self {
        Method::DENSE
    }
}

impl PartialEq for Method {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Method {}

impl hash::Hash for Method {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

impl fmt::Debug for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Serialize for Method {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        crate::settings::named::serialize(self, to)
    }
}

impl<'de> Deserialize<'de> for Method {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        crate::settings::named::deserialize(from)
    }
}

/// A share of all steps, as a step.
fn step_of(share: f64, steps: u64) -> u64 {
    (share * steps as f64).round() as u64
}

fn conflict(first: &str, second: &str, reason: &'static str) -> crate::Error {
    crate::Error::Conflict { first: first.to_owned(), second: second.to_owned(), reason }
}
