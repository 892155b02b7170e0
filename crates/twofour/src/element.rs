//! The element types that weights come in.

use std::fmt;

pub use half::{bf16, f16};

use crate::DataType;

/// An element that twofour can prune, compress and store.
///
/// Scores are made in f32 ([`Element::to_f32`] is exact for every type here), so that the same weight gives the
/// same mask whatever engine selects it.
pub trait Element: bytemuck::Pod + PartialEq + Send + Sync + fmt::Debug + 'static {
    /// Its data type; [`DataType::is_of_weights`].
    const DTYPE: DataType;

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
            const DTYPE: DataType = DataType::$dtype;
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
float_element!(f16, F16, f16::ZERO, widen_f16, narrow_f16);
float_element!(bf16, BF16, bf16::ZERO, widen_bf16, narrow_bf16);

/// As [`bf16::to_f32`], without a branch, so that a loop of it becomes vector instructions.
#[inline(always)]
fn widen_bf16(value: bf16) -> f32 {
    let bits = u32::from(value.to_bits());
    let quiet = if bits & 0x7FFF > 0x7F80 { 0x40 } else { 0 };
    f32::from_bits((bits | quiet) << 16)
}

/// As [`bf16::from_f32`], without a branch.
#[inline(always)]
fn narrow_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    bf16::from_bits(if value.is_nan() { nan } else { nearest } as u16)
}

/// As [`f16::to_f32`], without a branch or a call.
#[inline(always)]
fn widen_f16(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    let magnitude = (bits & 0x7FFF) << 13;
    // The exponents' biases differ by 112. Subnormal numbers are whole multiples of 2^-24, and normal ones in f32,
    // whose subnormal ones are slow.
    let subnormal = ((bits & 0x3FF) as f32 * power_of_two(-24)).to_bits();
    let finite = if bits & 0x7C00 == 0 { subnormal } else { magnitude + (112 << 23) };
    let quiet = if bits & 0x7FFF > 0x7C00 { 1 << 22 } else { 0 };
    let unbounded = magnitude | 0x7F80_0000 | quiet;
    let magnitude = if bits & 0x7C00 == 0x7C00 { unbounded } else { finite };
    f32::from_bits((bits & 0x8000) << 16 | magnitude)
}

/// As [`f16::from_f32`], without a branch or a call.
#[inline(always)]
fn narrow_f16(value: f32) -> f16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    // Adding a half to even and cutting 13 bits rounds; a carry runs into the exponent, and from 65520 on into
    // infinity.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + (magnitude >> 13 & 1)) >> 13;
    // The last place of a half is that of the least subnormal number.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let nan = 0x7E00 | magnitude >> 13 & 0x3FF;
    let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let bounded = if magnitude >= 0x4780_0000 { 0x7C00 } else { finite };
    let rounded = if magnitude > 0x7F80_0000 { nan } else { bounded };
    f16::from_bits((bits >> 16 & 0x8000 | rounded) as u16)
}

impl Element for i8 {
    const DTYPE: DataType = DataType::I8;
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

/// An 8-bit float with 4 exponent and 3 mantissa bits, no infinity (OCP `E4M3`, torch's `float8_e4m3fn`). Stored,
/// pruned and compressed; CPU kernels do not multiply it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

/// An 8-bit float with 5 exponent and 2 mantissa bits (OCP `E5M2`, torch's `float8_e5m2`). Stored, pruned and
/// compressed; CPU kernels do not multiply it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct F8E5M2(pub u8);

impl Element for F8E4M3 {
    const DTYPE: DataType = DataType::E4M3;
    const ZERO: Self = F8E4M3(0);
    fn to_f32(self) -> f32 {
        let sign = if self.0 & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from((self.0 >> 3) & 0xF);
        let mantissa = f32::from(self.0 & 7);
        match (exponent, self.0 & 7) {
            (15, 7) => f32::NAN,
            (0, _) => sign * mantissa * power_of_two(-9),
            _ => sign * (8.0 + mantissa) * power_of_two(exponent - 10),
        }
    }
}

impl Element for F8E5M2 {
    const DTYPE: DataType = DataType::E5M2;
    const ZERO: Self = F8E5M2(0);
    fn to_f32(self) -> f32 {
        // E5M2 is the upper byte of an f16.
        f16::from_bits(u16::from(self.0) << 8).to_f32()
    }
}

/// Returns two to the power of `exponent`, which lies between -126 and 127. Unlike `f32::powi`, whose precision may
/// differ between platforms, it is exact.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// The magnitude of an 8-bit float with `fraction` bits of fraction, whose smallest exponent is `least` and whose
/// largest code is `most`: the nearest, ties to even, and the largest for all that is larger. NaN is all ones.
fn nearest(value: f32, fraction: i32, least: i32, most: u8) -> u8 {
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return 0x7F;
    }
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(least);
    // In units of the last place, exactly; a carry runs into the exponent, as it should.
    let units =
        if exponent > 20 { return most } else { (magnitude * power_of_two(fraction - exponent)).round_ties_even() };
    let code = ((exponent - least) << fraction) + units as i32;
    code.min(i32::from(most)) as u8
}

impl Arithmetic for F8E4M3 {
    /// Saturates at ±448, as `cvt.rn.satfinite` does.
    fn from_f32(value: f32) -> Self {
        F8E4M3(nearest(value, 3, -6, 0x7E) | if value.is_sign_negative() { 0x80 } else { 0 })
    }
}

impl Arithmetic for F8E5M2 {
    /// Saturates at ±57344, as `cvt.rn.satfinite` does.
    fn from_f32(value: f32) -> Self {
        F8E5M2(nearest(value, 2, -14, 0x7B) | if value.is_sign_negative() { 0x80 } else { 0 })
    }
}

/// Evaluates an expression with `T` naming the Rust type of a data type of weights: all but i32. The expression is
/// generic over [`Element`](crate::Element) and returns a `Result` whose error can be made from
/// [`Error`](crate::Error); i32 is [`Error::UnsupportedDType`](crate::Error::UnsupportedDType).
///
/// ```
/// use twofour::{DataType, Element, match_element};
/// fn bytes<T: Element>() -> twofour::Result<usize> {
///     Ok(size_of::<T>())
/// }
/// assert_eq!(match_element!(DataType::BF16, |T| bytes::<T>())?, 2);
/// assert!(match_element!(DataType::I32, |T| bytes::<T>()).is_err());
/// # Ok::<(), twofour::Error>(())
/// ```
#[macro_export]
macro_rules! match_element {
    ($data_type:expr, |$T:ident| $body:expr) => {
        match $data_type {
            $crate::DataType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DataType::F16 => {
                type $T = $crate::element::f16;
                $body
            }
            $crate::DataType::BF16 => {
                type $T = $crate::element::bf16;
                $body
            }
            $crate::DataType::E4M3 => {
                type $T = $crate::F8E4M3;
                $body
            }
            $crate::DataType::E5M2 => {
                type $T = $crate::F8E5M2;
                $body
            }
            $crate::DataType::I8 => {
                type $T = i8;
                $body
            }
            $crate::DataType::I32 => Err($crate::DataType::I32.not_of_weights("this operation").into()),
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_converts_as_in_its_own_crate() {
        for high in 0..=u16::MAX {
            let value = bf16::from_bits(high);
            assert_eq!(widen_bf16(value).to_bits(), value.to_f32().to_bits(), "{high:#x}");
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(narrow_bf16(value).to_bits(), bf16::from_f32(value).to_bits(), "{high:#x} {low:#x}");
            }
        }
    }

    #[test]
    fn f16_converts_as_in_its_own_crate() {
        for bits in 0..=u16::MAX {
            let value = f16::from_bits(bits);
            assert_eq!(widen_f16(value).to_bits(), value.to_f32().to_bits(), "{bits:#x}");
        }
        // Every exponent and sign, with fractions about the places where rounding decides.
        for high in (0..=u16::MAX).step_by(0x40) {
            for fraction in 0..1024u32 {
                for low in [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF] {
                    let value = f32::from_bits(u32::from(high) << 16 | (fraction << 13 & 0x3F_FFFF) | low);
                    assert_eq!(narrow_f16(value).to_bits(), f16::from_f32(value).to_bits(), "{value:e}");
                }
            }
        }
    }

    #[test]
    fn eight_bit_floats_decode_to_the_values_of_their_specification() {
        // OCP 8-bit floating point specification, table of special values.
        assert_eq!(F8E4M3(0x7E).to_f32(), 448.0);
        assert_eq!(F8E4M3(0x01).to_f32(), 1.0 / 512.0);
        assert_eq!(F8E4M3(0x08).to_f32(), 1.0 / 64.0);
        assert_eq!(F8E4M3(0x38).to_f32(), 1.0);
        assert!(F8E4M3(0x7F).to_f32().is_nan() && F8E4M3(0xFF).to_f32().is_nan());
        assert_eq!(F8E5M2(0x7B).to_f32(), 57344.0);
        assert_eq!(F8E5M2(0x01).to_f32(), 1.0 / 65536.0);
        assert_eq!(F8E5M2(0x7C).to_f32(), f32::INFINITY);
        assert!(F8E4M3(0x80).is_negative_zero() && F8E5M2(0x80).is_negative_zero());
        assert!(F8E4M3(0x80).is_zero() && !F8E4M3(0x81).is_zero());
    }

    /// Every finite code is its value's; half-way values go to the even neighbour, others to the nearer one.
    fn rounds<T: Arithmetic>(codes: impl Fn(u8) -> T, code: impl Fn(T) -> u8, most: u8) {
        for bits in 0..most {
            let (low, high) = (codes(bits).to_f32(), codes(bits + 1).to_f32());
            let middle = low + (high - low) / 2.0;
            let even = bits + bits % 2;
            for sign in [1.0f32, -1.0] {
                let of = |value: f32| code(T::from_f32(sign * value));
                let with_sign = |bits: u8| if sign < 0.0 { bits | 0x80 } else { bits };
                assert_eq!([of(low), of(high), of(middle)], [bits, bits + 1, even].map(with_sign), "{low}");
                let near = |value: f32, by: i32| f32::from_bits((value.to_bits() as i32 + by) as u32);
                assert_eq!([of(near(middle, -1)), of(near(middle, 1))], [bits, bits + 1].map(with_sign), "{low}");
            }
        }
        let largest = codes(most).to_f32();
        for beyond in [largest * 1.01, largest * 2.0, f32::MAX, f32::INFINITY] {
            assert_eq!([code(T::from_f32(beyond)), code(T::from_f32(-beyond))], [most, most | 0x80]);
        }
        assert!(T::from_f32(f32::NAN).to_f32().is_nan());
        assert_eq!(code(T::from_f32(1e-40)), 0);
    }

    #[test]
    fn eight_bit_floats_are_the_nearest() {
        rounds(F8E4M3, |v| v.0, 0x7E);
        rounds(F8E5M2, |v| v.0, 0x7B);
    }

    #[test]
    fn integers_round_to_even_and_saturate() {
        assert_eq!([2.5, 3.5, -2.5, 1e9, -1e9, f32::NAN].map(i8::from_f32), [2, 4, -2, 127, -128, 0]);
    }
}
