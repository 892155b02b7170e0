//! The settings of sparsity, as a recipe has them: each is declared once, with its type and how it is read.

use serde::{Deserialize, Serialize};
use twofour::{
    layer::{MaskRule, WeightGradient},
    select::Transposable,
};

use super::{METHODS, Method, SparsifierSettings};
use crate::{
    linear::SparsePrecision,
    settings::{
        MAX_STEPS, Mistakes, NOT_NEGATIVE, Named, OwnSettings, POSITIVE, SHARE, Section, is_default, name_of,
        named_option,
    },
};

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
    /// A number, or, outside of overrides, `"auto"`.
    fn read(s: &mut Section<'_>, key: &'static str, m: &mut Mistakes) -> Option<Self> {
        if s.name() == "sparsity.override" {
            return s.number(key, NOT_NEGATIVE, m).map(DecayStrength::Given);
        }
        s.number_or(key, NOT_NEGATIVE, "auto", m).map(|found| match found {
            Some(strength) => DecayStrength::Given(strength),
            None => DecayStrength::Searched(Searched::Auto),
        })
    }

    /// The number, where one is given.
    pub fn strength(self) -> Option<f64> {
        match self {
            DecayStrength::Given(strength) => Some(strength),
            DecayStrength::Searched(_) => None,
        }
    }
}

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

impl Named for SparsePrecision {
    const ALL: &'static [(&'static str, Self)] =
        &[("activations", SparsePrecision::Activations), ("fp8", SparsePrecision::Fp8)];
}

/// The source of the settings that a recipe does not give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
pub enum Defaults {
    /// This project's.
    #[default]
    #[serde(rename = "twofour")]
    Own,
    /// The 2by4-pretrain toolkit's, which is the implementation of FST, S-STE and STEP by two papers' authors.
    #[serde(rename = "2by4-pretrain")]
    Toolkit,
}

impl Named for Defaults {
    const ALL: &'static [(&'static str, Self)] = &[("twofour", Defaults::Own), ("2by4-pretrain", Defaults::Toolkit)];
}

/// Declares the settings of the section and of its overrides: `both` has those of both, `section` those of the section
/// alone, `flags` those of the section that have a default whatever the method is.
macro_rules! keys {
    (
        both { $( $(#[$b:meta])* $both:ident: $bt:ty = $bread:expr; )* }
        section { $( $(#[$s:meta])* $section:ident: $st:ty = $sread:expr; )* }
        flags { $( $(#[$f:meta])* $flag:ident: $ft:ty = $fread:expr; )* }
    ) => {
        /// Which layers are 2:4, when, and how they are trained. Absent fields are those of the method.
        #[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
        #[serde(default)]
        pub struct SparsitySettings {
            /// The method.
            pub method: Method,
            /// Names of linear layers, with `*`; those that [the method](super::TrainingMethod::layers) is for if
            /// absent.
            pub layers: Option<Vec<String>>,
            $( $(#[$b])* pub $both: Option<$bt>, )*
            $( $(#[$s])* pub $section: Option<$st>, )*
            $( $(#[$f])* #[serde(skip_serializing_if = "is_default")] pub $flag: $ft, )*
            /// Settings that the method alone has.
            #[serde(flatten)]
            pub own: OwnSettings,
            /// The masks of [`Method::SPARSIFIER`], of this section and of overrides.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub sparsifier: Option<SparsifierSettings>,
            /// Layers with settings of their own.
            #[serde(rename = "override", skip_serializing_if = "Vec::is_empty")]
            pub overrides: Vec<LayerOverride>,
        }

        /// Settings of some layers, in place of those of the section. Absent fields are those of the section, or, with
        /// another method, those of that method.
        #[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
        #[serde(default)]
        pub struct LayerOverride {
            /// Names of linear layers, with `*`.
            pub layers: Vec<String>,
            /// The method; [`Method::DENSE`] takes layers out.
            pub method: Option<Method>,
            $( $(#[$b])* pub $both: Option<$bt>, )*
            /// Settings that the method alone has.
            #[serde(flatten)]
            pub own: OwnSettings,
            /// The masks of [`Method::SPARSIFIER`], over [`SparsitySettings::sparsifier`].
            #[serde(skip_serializing_if = "Option::is_none")]
            pub sparsifier: Option<SparsifierSettings>,
        }

        type Read<T> = fn(&mut Section<'_>, &'static str, &mut Mistakes) -> Option<T>;

        impl SparsitySettings {
            /// The settings of `[sparsity]` and of each `[[sparsity.override]]`, each section with that of its
            /// sparsifier.
            pub(crate) fn read(
                (s, sparsifier): (&mut Section<'_>, &mut Section<'_>),
                (overrides, sparsifiers): (&mut [Section<'_>], &mut [Section<'_>]),
                m: &mut Mistakes,
            ) -> Self {
                let method = s.choice("method", m).unwrap_or_default();
                let layers = s.texts("layers", m).map(|list| list.into_iter().map(|(text, _)| text).collect());
                $( let read: Read<$bt> = $bread; let $both = read(s, stringify!($both), m); )*
                $( let read: Read<$st> = $sread; let $section = read(s, stringify!($section), m); )*
                $( let read: Read<$ft> = $fread; let $flag = read(s, stringify!($flag), m).unwrap_or_default(); )*
                let own = OwnSettings::read(METHODS.iter().flat_map(|method| method.own()), s, m);
                let sparsifier = SparsifierSettings::read_present(sparsifier, m);
                let overrides = overrides.iter_mut().zip(sparsifiers);
                let overrides = overrides.map(|(own, sparsifier)| LayerOverride::read(own, sparsifier, m)).collect();
                SparsitySettings {
                    method, layers, $( $both, )* $( $section, )* $( $flag, )* own, sparsifier, overrides,
                }
            }

            /// The keys that are given, but for `method`, `layers` and sections.
            pub(super) fn given(&self) -> Vec<&'static str> {
                let mut given = vec![];
                $( given.extend(self.$both.is_some().then_some(stringify!($both))); )*
                $( given.extend(self.$section.is_some().then_some(stringify!($section))); )*
                $( given.extend((!is_default(&self.$flag)).then_some(stringify!($flag))); )*
                let all = METHODS.iter().flat_map(|method| method.own());
                given.extend(all.map(|setting| setting.key).filter(|key| self.own.has(key)));
                given
            }
        }

        impl LayerOverride {
            fn read(s: &mut Section<'_>, sparsifier: &mut Section<'_>, m: &mut Mistakes) -> Self {
                let layers = s.texts("layers", m).map(|list| list.into_iter().map(|(text, _)| text).collect());
                let layers = s.required("layers", "the layers that it is for", layers, Vec::new(), m);
                let method = s.choice("method", m);
                $( let read: Read<$bt> = $bread; let $both = read(s, stringify!($both), m); )*
                let methods = METHODS.iter().filter(|method| !method.watches());
                let own = OwnSettings::read(methods.flat_map(|method| method.own()), s, m);
                let sparsifier = SparsifierSettings::read_present(sparsifier, m);
                LayerOverride { layers, method, $( $both, )* own, sparsifier }
            }

            /// The settings of these layers, over those of the section.
            pub fn over(&self, section: &SparsitySettings) -> SparsitySettings {
                let method = self.method.unwrap_or(section.method);
                let mut base = SparsitySettings { overrides: vec![], ..section.clone() };
                if method != section.method {
                    let SparsitySettings { $( $flag, )* .. } = *section;
                    let sparsifier = base.sparsifier;
                    base = SparsitySettings { method, $( $flag, )* sparsifier, ..Default::default() };
                }
                if let (Some(own), Some(section)) = (&self.sparsifier, &base.sparsifier)
                    && own.has_other_times(section)
                {
                    (base.begin, base.mask_every) = (None, None);
                }
                SparsitySettings {
                    layers: Some(self.layers.clone()),
                    $( $both: self.$both.or(base.$both), )*
                    own: self.own.over(&base.own),
                    sparsifier: match (&self.sparsifier, &base.sparsifier) {
                        (Some(own), Some(section)) => Some(own.over(section)),
                        (Some(own), None) => Some(own.clone()),
                        (None, _) => base.sparsifier.clone().filter(|_| method == Method::SPARSIFIER),
                    },
                    ..base
                }
            }
        }
    };
}

keys! {
    both {
        /// The rule of masks.
        #[serde(with = "named_option")]
        mask: MaskRule = |s, key, m| s.choice(key, m);
        /// Optimizer steps between two choices of the mask.
        mask_every: u64 = |s, key, m| s.integer(key, 1, MAX_STEPS, m);
        /// The weight gradient.
        #[serde(with = "named_option")]
        weight_gradient: WeightGradient = |s, key, m| s.choice(key, m);
        /// The factor of the decay of pruned weights, λ; in an override always a number.
        decay: DecayStrength = DecayStrength::read;
        /// Where that decay is added.
        decay_target: DecayTarget = |s, key, m| s.choice(key, m);
        /// The share of all steps after which layers become 2:4; with [`Method::STEP`], after which they may.
        begin: f64 = |s, key, m| s.number(key, SHARE, m);
        /// The share of all steps after which layers become dense again.
        end: f64 = |s, key, m| s.number(key, SHARE, m);
        /// The share of all steps after which groups keep two of four; from `begin` until then they keep three.
        two_of_four_from: f64 = |s, key, m| s.number(key, SHARE, m);
    }
    section {
        /// The strengths that trial runs compare where `decay` is `"auto"`.
        decay_grid: Vec<f64> = |s, key, m| s.numbers(key, POSITIVE, m);
        /// Optimizer steps of each trial run.
        decay_trial_steps: u64 = |s, key, m| s.integer(key, 2, MAX_STEPS, m);
    }
    flags {
        /// The precision of the GEMMs of 2:4 layers.
        precision: SparsePrecision = |s, key, m| s.choice(key, m);
        /// The source of the settings that this recipe does not give.
        defaults: Defaults = |s, key, m| s.choice(key, m);
        /// Whether the flip rate is measured at every step, whatever the layers' form and however rarely masks are
        /// chosen.
        observe: bool = |s, key, m| s.boolean(key, m);
    }
}
