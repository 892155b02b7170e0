//! 2:4 weights in eight bits: kept values as integers from -127 to 127, with a scale for each row or for some of its
//! columns.
//!
//! `w ≈ q · scale`, symmetric: no zero points, so what is pruned stays zero.

use half::f16;

use crate::{
    int4::Granularity,
    quantization::{IntegerRange, Integers, Quantized},
};

/// A 2:4 weight `[rows, cols]` of eight-bit integers; see the [module](self).
///
/// Scales are f32 for whole rows, and f32 numbers that f16 holds for groups of columns, as files store them.
///
/// ```
/// use twofour::{Compressed, MatrixRef, int4::Granularity, int8::Int8};
/// let w = [0.0f32, 127.0, 0.0, -3.4, 1.0, 0.0, 0.0, 0.0];
/// let q = Int8::quantize(&Compressed::from_dense(MatrixRef::new(1, 8, &w)?)?, Granularity::Row)?;
/// assert_eq!(q.weight().values(), [127, -3, 1, 0]);
/// # Ok::<(), twofour::Error>(())
/// ```
pub type Int8 = Quantized<EightBits>;

/// Integers from -127 to 127.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EightBits {}

impl Integers for EightBits {
    type Scale = f32;

    const SCALES: &'static str = "scales of an eight-bit weight";

    fn range(granularity: Granularity) -> IntegerRange {
        IntegerRange { largest: 127, lowest: -127, half_scales: granularity != Granularity::Row }
    }

    fn stored(scale: f32) -> f32 {
        scale
    }

    fn is_stored(scale: f32, granularity: Granularity) -> bool {
        granularity == Granularity::Row || f16::from_f32(scale).to_f32() == scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Compressed, Error, MatrixRef};

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let weight = || Compressed::from_dense(MatrixRef::new(1, 132, &[0i8; 132]).unwrap()).unwrap();
        let from = |scales, granularity| Int8::from_parts(weight(), scales, granularity).map(drop);
        assert!(from(vec![0.1], Granularity::Row).is_ok());
        assert!(matches!(from(vec![0.5, 0.1], Granularity::Group), Err(Error::Scale { row: 0, scale: 1 })));
        assert!(matches!(from(vec![f32::NAN], Granularity::Row), Err(Error::Scale { row: 0, scale: 0 })));
        assert!(matches!(from(vec![0.5; 2], Granularity::Group64), Err(Error::Length { expected: 3, found: 2, .. })));
        assert!(from(vec![0.5; 3], Granularity::Group64).is_ok());
    }

    #[test]
    fn a_row_is_within_half_a_step_and_a_group_has_its_own_scale() {
        let mut data = vec![0.0f32; 256];
        (data[0], data[1], data[128]) = (1.0, 0.3, 1e-3);
        let weight = Compressed::from_dense(MatrixRef::new(1, 256, &data).unwrap()).unwrap();
        let by_row = Int8::quantize(&weight, Granularity::Row).unwrap();
        assert_eq!((by_row.scales(), by_row.weight().values()[64]), (&[1.0 / 127.0][..], 0));
        let by_group = Int8::quantize(&weight, Granularity::Group).unwrap();
        assert_eq!(by_group.weight().values()[64], 127);
        assert!((by_group.dequantize().values()[1] - 0.3).abs() <= 0.5 / 127.0 * 1.001);
    }
}
