//! 2:4 weights in four bits: kept values as integers from -8 to 7, with a scale for each row or for 128 or 64 of its
//! columns.
//!
//! `w ≈ q · scale`, symmetric: no zero points, so what is pruned stays zero. This is the arithmetic of Sparse-Marlin
//! (IST-DASLab, 2024); the bit layout depends on the engine ([`crate::layout::lanes`]).

use half::f16;

use crate::{
    Compressed, Error, Result,
    quantization::{IntegerRange, Integers, Quantized},
};

pub use crate::quantization::{GROUP, Granularity};

/// What is added to an integer that is stored in half a byte.
const OFFSET: i8 = 8;

/// A 2:4 weight `[rows, cols]` of four-bit integers; see the [module](self).
///
/// Where a scale is below the one of [`ScaleRule::MaxAbs`](crate::quantization::ScaleRule::MaxAbs), values are clipped
/// to -8 and 7. Where it is below f16's least positive number they become zero.
///
/// ```
/// use twofour::{Compressed, MatrixRef, int4::{Granularity, Int4}};
/// let w = [0.0f32, 7.0, 0.0, -3.4, 1.0, 0.0, 0.0, 0.0];
/// let q = Int4::quantize(&Compressed::from_dense(MatrixRef::new(1, 8, &w)?)?, Granularity::Row)?;
/// assert_eq!(q.weight().values(), [7, -3, 1, 0]);
/// assert_eq!(q.dequantize().to_dense(), [0.0, 7.0, 0.0, -3.0, 1.0, 0.0, 0.0, 0.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
pub type Int4 = Quantized<FourBits>;

/// Integers from -8 to 7, with scales in f16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FourBits {}

impl Integers for FourBits {
    type Scale = f16;

    const SCALES: &'static str = "scales of a four-bit weight";

    fn range(_: Granularity) -> IntegerRange {
        IntegerRange { largest: 7, lowest: -8, half_scales: true }
    }

    fn stored(scale: f32) -> f16 {
        f16::from_f32(scale)
    }

    fn check(weight: &Compressed<i8>) -> Result<()> {
        let kept = 2 * weight.groups();
        match weight.values().iter().position(|q| !(-8..=7).contains(q)) {
            Some(i) => Err(Error::NotFourBits { row: i / kept, group: i % kept / 2, value: weight.values()[i] }),
            None => Ok(()),
        }
    }
}

impl Int4 {
    /// From values as [`Int4::packed_values`] returns them, metadata words and scales.
    ///
    /// # Errors
    /// [`Error::Length`] where a slice does not fit the shape; those of [`Compressed::from_parts`] and
    /// [`Quantized::from_parts`].
    pub fn from_packed(
        rows: usize,
        cols: usize,
        values: &[u8],
        meta: Vec<u32>,
        scales: Vec<f16>,
        granularity: Granularity,
    ) -> Result<Self> {
        let half = |bits: u8| bits as i8 - OFFSET;
        let values = values.iter().flat_map(|pair| [half(pair & 15), half(pair >> 4)]).collect();
        Self::from_parts(Compressed::from_parts(rows, cols, values, meta)?, scales, granularity)
    }

    /// The integers, two in a byte, `[rows, ceil(cols / 4)]`: those of a group, each plus 8, the first in the lower
    /// half.
    pub fn packed_values(&self) -> Vec<u8> {
        let half = |q: i8| (q + OFFSET) as u8;
        let pairs = self.weight().values().as_chunks::<2>().0;
        pairs.iter().map(|[first, second]| half(*first) | half(*second) << 4).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Mask, MatrixRef};

    proptest! {
        #[test]
        fn what_is_rounded_is_within_half_a_scale(
            (rows, cols, data) in (0usize..5, 0usize..300)
                .prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec(-100.0f32..100.0, r * c))),
            granularity in proptest::sample::select(&Granularity::ALL),
        ) {
            let weight = Compressed::from_pruned(MatrixRef::new(rows, cols, &data).unwrap()).unwrap();
            let q = Int4::quantize(&weight, granularity).unwrap();
            let (before, after) = (weight.to_dense(), q.dequantize().to_dense());
            for (i, (a, b)) in before.iter().zip(&after).enumerate() {
                let scale = q.scale(i / cols, i % cols).to_f32();
                // The scale itself is rounded to eleven bits, which can cut the largest of its values.
                prop_assert!((a - b).abs() <= scale * 0.5 * (1.0 + 0.01), "{a} became {b} with scale {scale}");
                prop_assert!(*a != 0.0 || *b == 0.0);
            }
            // Integers times scales round to themselves, and the parts make the whole.
            let parts = Int4::from_parts(q.weight().clone(), q.scales().to_vec(), granularity).unwrap();
            prop_assert_eq!(&parts, &q);
            let (packed, meta) = (q.packed_values(), q.weight().meta().to_vec());
            prop_assert_eq!(packed.len(), rows * cols.div_ceil(4));
            let again = Int4::from_packed(rows, cols, &packed, meta, q.scales().to_vec(), granularity).unwrap();
            prop_assert_eq!(again, q);
        }
    }

    #[test]
    fn every_scale_serves_its_own_columns() {
        let mut data = vec![0.0f32; 2 * 256];
        (data[0], data[128], data[256]) = (7.0, 0.07, 700.0);
        let weight = Compressed::from_dense(MatrixRef::new(2, 256, &data).unwrap()).unwrap();
        let scales = |granularity| -> Vec<f32> {
            let q = Int4::quantize(&weight, granularity).unwrap();
            q.scales().iter().map(|scale| scale.to_f32()).collect()
        };
        assert_eq!(scales(Granularity::Row), [1.0, 100.0]);
        assert_eq!(scales(Granularity::Group), [1.0, f16::from_f32(0.01).to_f32(), 100.0, 0.0]);
    }

    #[test]
    fn what_cannot_be_is_an_error_with_its_place() {
        let quantize = |at: usize, value: f32| {
            let mut data = vec![0.0f32; 2 * 132];
            data[at] = value;
            let mask = Mask::from_fn(2, 132, |_, col| col % 4 < 2);
            let weight = Compressed::from_masked(MatrixRef::new(2, 132, &data).unwrap(), &mask).unwrap();
            Int4::quantize(&weight, Granularity::Group).unwrap_err()
        };
        assert!(matches!(quantize(132 + 5, f32::NAN), Error::NotANumber { row: 1, col: 5 }));
        assert!(matches!(quantize(129, f32::INFINITY), Error::Infinite { row: 0, col: 129 }));
        assert!(matches!(quantize(132 + 128, 1e6), Error::Scale { row: 1, scale: 1 }));
        let weight = |q: i8| Compressed::from_dense(MatrixRef::new(1, 8, &[0, 0, 0, 0, 1, q, 0, 0]).unwrap()).unwrap();
        let from = |q, scales| Int4::from_parts(weight(q), scales, Granularity::Row);
        assert!(matches!(from(8, vec![f16::ONE]), Err(Error::NotFourBits { row: 0, group: 1, value: 8 })));
        assert!(matches!(from(7, vec![f16::NAN]), Err(Error::Scale { row: 0, scale: 0 })));
        assert!(matches!(from(7, vec![]), Err(Error::Length { expected: 1, found: 0, .. })));
        // Too small for a scale: zero.
        let tiny = Compressed::from_dense(MatrixRef::new(1, 4, &[1e-9f32, 0.0, 0.0, 0.0]).unwrap()).unwrap();
        assert_eq!(Int4::quantize(&tiny, Granularity::Row).unwrap().weight().values(), [0, 0]);
    }
}
