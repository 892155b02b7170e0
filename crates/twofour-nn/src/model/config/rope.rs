//! The frequencies of rotary position embedding, and their scaling for contexts longer than the model was first trained
//! on.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Rotary position embedding: which angle a pair of elements turns by from one position to the next.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Pair `i` of a head of `d` elements turns by `base^(-2i / d)`.
    pub base: f64,
    /// Scaling of these frequencies.
    pub scaling: Option<RopeScaling>,
}

/// Scaling of frequencies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum RopeScaling {
    /// Llama 3's (`rope_type` `llama3`): frequencies whose wavelength exceeds the original context are divided by a
    /// factor, short ones are kept, and those between are
    /// interpolated.
    Llama3 {
        /// What low frequencies are divided by.
        factor: f64,
        /// Wavelengths above the original context divided by this are scaled in full.
        low_frequency_factor: f64,
        /// Wavelengths below the original context divided by this are kept.
        high_frequency_factor: f64,
        /// The context before scaling.
        original_context: f64,
    },
    /// Nothing is rotated: all frequencies are 0 (layers of SmolLM3).
    Unrotated,
    /// All frequencies are divided by a factor (`rope_type` `linear`).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// YaRN's (`rope_type` `yarn`; Peng et al., 2023): pairs that turn often within the original context keep their
    /// frequency, those that turn seldom have it divided by a factor, and pairs between have it interpolated by their
    /// number. What it multiplies scores by is part of their scale.
    Yarn {
        /// What low frequencies are divided by.
        factor: f64,
        /// Turns within the original context from which frequencies are kept.
        fast_turns: f64,
        /// Turns within the original context up to which frequencies are divided.
        slow_turns: f64,
        /// The context before scaling.
        original_context: f64,
        /// Whether the interpolation begins and ends at whole pairs.
        rounded: bool,
    },
    /// LongRoPE's (`rope_type` `longrope`; Ding et al., 2024): each frequency is divided by a number of its own, which
    /// is another in texts longer than the original context.
    Long {
        /// The divisors in texts up to the original context, one for each pair.
        short: Vec<f64>,
        /// The divisors in longer texts, one for each pair.
        long: Vec<f64>,
        /// What rotated elements are multiplied by.
        attention_factor: f64,
        /// The context before scaling.
        original_context: f64,
    },
}

impl Rope {
    /// The angle between neighbouring positions of each of the `rotated / 2` pairs of so many elements of a head, in
    /// texts up to the original context.
    ///
    /// ```
    /// use twofour_nn::model::Rope;
    /// assert_eq!(Rope { base: 10_000.0, scaling: None }.frequencies(4), [1.0, 0.01]);
    /// ```
    pub fn frequencies(&self, rotated: usize) -> Vec<f64> {
        self.frequencies_in(rotated, 0)
    }

    /// [`Rope::frequencies`] in a text of so many tokens.
    pub(crate) fn frequencies_in(&self, rotated: usize, tokens: usize) -> Vec<f64> {
        let plain = (0..rotated / 2).map(|pair| self.base.powf(-2.0 * pair as f64 / rotated as f64));
        let Some(scaling) = &self.scaling else { return plain.collect() };
        let (share, is_stretched) = (self.kept_share(scaling, rotated), self.is_stretched(tokens));
        let scaled = |(pair, frequency)| scaling.apply(frequency, (pair, share(pair)), is_stretched);
        plain.enumerate().map(scaled).collect()
    }

    /// Whether a text of so many tokens has other frequencies than shorter ones.
    pub(crate) fn is_stretched(&self, tokens: usize) -> bool {
        matches!(&self.scaling, Some(RopeScaling::Long { original_context, .. }) if tokens as f64 > *original_context)
    }

    /// What rotated elements are multiplied by.
    pub(crate) fn factor(&self) -> f64 {
        match self.scaling {
            Some(RopeScaling::Long { attention_factor, .. }) => attention_factor,
            _ => 1.0,
        }
    }

    /// An error for divisors that are not one for each of the pairs of so many elements.
    pub(super) fn validate(&self, rotated: usize) -> Result<()> {
        let Some(RopeScaling::Long { short, long, .. }) = &self.scaling else { return Ok(()) };
        match [short, long].into_iter().find(|divisors| divisors.len() != rotated / 2) {
            None => Ok(()),
            Some(divisors) => Err(Error::Setting {
                what: "divisors of frequencies",
                found: format!("{} for {rotated} elements of a head", divisors.len()),
                expected: "one for each pair of elements that is rotated",
            }),
        }
    }

    /// The share of YaRN's frequencies that is kept, by the number of the pair; 1 for other scalings.
    fn kept_share(&self, scaling: &RopeScaling, rotated: usize) -> impl Fn(usize) -> f64 {
        let range = match *scaling {
            RopeScaling::Yarn { fast_turns, slow_turns, original_context, rounded, .. } => {
                // The pair that turns so often within the original context.
                let pair =
                    |turns: f64| rotated as f64 * (original_context / (turns * TAU)).ln() / (2.0 * self.base.ln());
                let (first, last) = (pair(fast_turns), pair(slow_turns));
                let (first, last) = if rounded { (first.floor(), last.ceil()) } else { (first, last) };
                let (first, last) = (first.max(0.0), last.min(rotated as f64 - 1.0));
                Some((first, if first == last { last + 0.001 } else { last }))
            }
            _ => None,
        };
        move |pair| match range {
            Some((first, last)) => 1.0 - ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0),
            None => 1.0,
        }
    }
}

impl RopeScaling {
    /// The scaled frequency of a pair, of which YaRN keeps a share.
    fn apply(&self, frequency: f64, (pair, kept): (usize, f64), is_stretched: bool) -> f64 {
        match *self {
            RopeScaling::Long { ref short, ref long, .. } => {
                let divisors = if is_stretched { long } else { short };
                divisors.get(pair).map_or(frequency, |divisor| frequency / divisor)
            }
            RopeScaling::Yarn { factor, .. } => kept * frequency + (1.0 - kept) * frequency / factor,
            RopeScaling::Unrotated => 0.0,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_frequency_factor, high_frequency_factor, original_context } => {
                let turns = original_context * frequency / TAU;
                let share = (turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor);
                let share = share.clamp(0.0, 1.0);
                share * frequency + (1.0 - share) * frequency / factor
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_3_scales_long_wavelengths_only() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_frequency_factor: 1.0,
            high_frequency_factor: 4.0,
            original_context: 8192.0,
        };
        let [plain, scaled] = [None, Some(scaling)].map(|scaling| Rope { base: 500_000.0, scaling }.frequencies(128));
        assert_eq!(plain[0], scaled[0]);
        assert_eq!(plain[63] / 8.0, scaled[63]);
        // By the published formula, transformers 5.24 (`_compute_llama3_parameters`), pair 32.
        let frequency: f64 = 500_000f64.powf(-0.5);
        let smooth = (8192.0 / (TAU / frequency) - 1.0) / 3.0;
        let expected = (1.0 - smooth) * frequency / 8.0 + smooth * frequency;
        assert!((0.0..1.0).contains(&smooth) && (scaled[32] - expected).abs() < 1e-12);
    }
}
