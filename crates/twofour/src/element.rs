//! The element types that weights come in.

use std::fmt;

use half::{bf16, f16};

/// The dtype of a tensor's elements, under the names that safetensors uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum DType {
    F32,
    F16,
    BF16,
    I8,
    F8E4M3,
    F8E5M2,
}

impl DType {
    /// Bytes an element takes.
    pub fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::I8 | DType::F8E4M3 | DType::F8E5M2 => 1,
        }
    }

    /// The name that safetensors headers use.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::I8 => "I8",
            DType::F8E4M3 => "F8_E4M3",
            DType::F8E5M2 => "F8_E5M2",
        }
    }

    /// The dtype of that safetensors name, if twofour knows it.
    pub fn from_name(name: &str) -> Option<Self> {
        [DType::F32, DType::F16, DType::BF16, DType::I8, DType::F8E4M3, DType::F8E5M2]
            .into_iter()
            .find(|d| d.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An element that twofour can prune, compress and store.
///
/// Scores are made in f32 ([`Element::to_f32`] is exact for every type here), so that the same weight gives the
/// same mask whatever engine selects it.
pub trait Element: bytemuck::Pod + PartialEq + Send + Sync + fmt::Debug + 'static {
    /// Its dtype.
    const DTYPE: DType;

    /// Positive zero: the value of an element that is not kept.
    const ZERO: Self;

    /// The exact value.
    fn to_f32(self) -> f32;

    /// Whether it is a zero of either sign.
    fn is_zero(self) -> bool {
        self.to_f32() == 0.0
    }

    /// Whether it is -0.0.
    fn is_negative_zero(self) -> bool {
        let v = self.to_f32();
        v == 0.0 && v.is_sign_negative()
    }
}

/// An element that can be computed with: what kernels, criteria and estimators produce.
pub trait Arithmetic: Element {
    /// The nearest value, ties to even; integers saturate.
    fn from_f32(value: f32) -> Self;
}

macro_rules! float_element {
    ($type:ty, $dtype:ident, $zero:expr, $to:expr, $from:expr) => {
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            const ZERO: Self = $zero;
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to(self)
            }
        }
        impl Arithmetic for $type {
            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                $from(value)
            }
        }
    };
}

float_element!(f32, F32, 0.0, std::convert::identity, std::convert::identity);
float_element!(f16, F16, f16::ZERO, f16::to_f32, f16::from_f32);
float_element!(bf16, BF16, bf16::ZERO, bf16::to_f32, bf16::from_f32);

impl Element for i8 {
    const DTYPE: DType = DType::I8;
    const ZERO: Self = 0;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from(self)
    }
}

impl Arithmetic for i8 {
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        // `as` saturates; the round is to even, as the GPU's conversion does.
        value.round_ties_even() as i8
    }
}

/// An 8-bit float with 4 exponent and 3 mantissa bits, no infinity (OCP `E4M3`, torch's `float8_e4m3fn`). Stored, pruned
/// and compressed; not yet computed with on a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

/// An 8-bit float with 5 exponent and 2 mantissa bits (OCP `E5M2`, torch's `float8_e5m2`). Stored, pruned and compressed; not
/// yet computed with on a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E5M2(pub u8);

impl Element for F8E4M3 {
    const DTYPE: DType = DType::F8E4M3;
    const ZERO: Self = F8E4M3(0);
    fn to_f32(self) -> f32 {
        let sign = if self.0 & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from((self.0 >> 3) & 0xF);
        let mantissa = f32::from(self.0 & 7);
        match (exponent, self.0 & 7) {
            (15, 7) => f32::NAN,
            (0, _) => sign * mantissa * 2f32.powi(-9),
            _ => sign * (8.0 + mantissa) * 2f32.powi(exponent - 10),
        }
    }
}

impl Element for F8E5M2 {
    const DTYPE: DType = DType::F8E5M2;
    const ZERO: Self = F8E5M2(0);
    fn to_f32(self) -> f32 {
        // E5M2 is the upper byte of an f16.
        f16::from_bits(u16::from(self.0) << 8).to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_decode_to_the_values_of_their_specification() {
        // OCP 8-bit floating point specification, table of special values.
        assert_eq!(F8E4M3(0x7E).to_f32(), 448.0);
        assert_eq!(F8E4M3(0x01).to_f32(), 2f32.powi(-9));
        assert_eq!(F8E4M3(0x08).to_f32(), 2f32.powi(-6));
        assert_eq!(F8E4M3(0x38).to_f32(), 1.0);
        assert!(F8E4M3(0x7F).to_f32().is_nan() && F8E4M3(0xFF).to_f32().is_nan());
        assert_eq!(F8E5M2(0x7B).to_f32(), 57344.0);
        assert_eq!(F8E5M2(0x01).to_f32(), 2f32.powi(-16));
        assert_eq!(F8E5M2(0x7C).to_f32(), f32::INFINITY);
        assert!(F8E4M3(0x80).is_negative_zero() && F8E5M2(0x80).is_negative_zero());
        assert!(F8E4M3(0x80).is_zero() && !F8E4M3(0x81).is_zero());
    }

    #[test]
    fn integers_round_to_even_and_saturate() {
        assert_eq!([2.5, 3.5, -2.5, 1e9, -1e9, f32::NAN].map(i8::from_f32), [2, 4, -2, 127, -128, 0]);
    }
}
