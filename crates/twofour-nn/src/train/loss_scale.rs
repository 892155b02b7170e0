//! Dynamic loss scaling for f16.

use serde::{Deserialize, Serialize};
use twofour::DataType;

/// The factor that gradients are multiplied by on their way through f16, whose smallest normal number is 6e-5. It falls
/// where a gradient overflows and rises again after a while without overflow (Micikevicius et al., "Mixed Precision
/// Training", ICLR 2018).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    scale: f32,
    steady: u32,
    is_dynamic: bool,
}

impl LossScale {
    const INITIAL: f32 = 65536.0;
    const LARGEST: f32 = 16_777_216.0;
    /// Steps without overflow after which the scale doubles.
    const PATIENCE: u32 = 1000;

    /// Dynamic for f16, and 1 for every other compute type.
    pub fn for_type(compute: DataType) -> Self {
        let is_dynamic = compute == DataType::F16;
        LossScale { scale: if is_dynamic { Self::INITIAL } else { 1.0 }, steady: 0, is_dynamic }
    }

    /// The factor: a power of two.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// Whether both are dynamic or both are not: state of the one can go on as the other's.
    pub(crate) fn is_like(&self, other: &LossScale) -> bool {
        self.is_dynamic == other.is_dynamic
    }

    /// Takes note of a step whose gradients were finite or not.
    pub fn observe(&mut self, is_finite: bool) {
        if !self.is_dynamic {
            return;
        }
        if !is_finite {
            (self.scale, self.steady) = ((self.scale / 2.0).max(1.0), 0);
            return;
        }
        self.steady += 1;
        if self.steady == Self::PATIENCE {
            (self.scale, self.steady) = ((self.scale * 2.0).min(Self::LARGEST), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_halves_at_overflow_and_doubles_after_a_while() {
        let mut scale = LossScale::for_type(DataType::F16);
        scale.observe(false);
        assert_eq!(scale.scale(), LossScale::INITIAL / 2.0);
        (0..LossScale::PATIENCE - 1).for_each(|_| scale.observe(true));
        assert_eq!(scale.scale(), LossScale::INITIAL / 2.0);
        scale.observe(true);
        assert_eq!(scale.scale(), LossScale::INITIAL);
        (0..60).for_each(|_| scale.observe(false));
        assert_eq!(scale.scale(), 1.0);
        let mut fixed = LossScale::for_type(DataType::BF16);
        fixed.observe(false);
        assert_eq!(fixed.scale(), 1.0);
    }
}
