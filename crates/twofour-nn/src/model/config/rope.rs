//! The frequencies of rotary position embedding, and their scaling for contexts longer than the model was first trained
//! on.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

/// Rotary position embedding: which angle a pair of elements turns by from one position to the next.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Pair `i` of a head of `d` elements turns by `base^(-2i / d)`.
    pub base: f64,
    /// Scaling of these frequencies.
    pub scaling: Option<RopeScaling>,
}

/// Scaling of frequencies.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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
    /// All frequencies are divided by a factor (`rope_type` `linear`).
    Linear {
        /// The divisor.
        factor: f64,
    },
}

impl Rope {
    /// The angle between neighbouring positions of each of the `head_dim / 2` pairs.
    ///
    /// ```
    /// use twofour_nn::model::Rope;
    /// assert_eq!(Rope { base: 10_000.0, scaling: None }.frequencies(4), [1.0, 0.01]);
    /// ```
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let plain = (0..head_dim / 2).map(|pair| self.base.powf(-2.0 * pair as f64 / head_dim as f64));
        plain.map(|frequency| self.scaling.map_or(frequency, |scaling| scaling.apply(frequency))).collect()
    }
}

impl RopeScaling {
    fn apply(&self, frequency: f64) -> f64 {
        match *self {
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
