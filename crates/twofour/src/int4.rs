//! 2:4 weights in four bits: kept values as integers from -8 to 7, with a scale for each row or for 128 or 64 of its columns.
//!
//! `w ≈ q · scale`, symmetric: no zero points, so what is pruned stays zero. This is the arithmetic of Sparse-Marlin (IST-DASLab, 2024);
//! where the bits lie is the engines' affair ([`crate::layout::lanes`]).

use half::f16;
use serde::{Deserialize, Serialize};

use crate::{
    Arithmetic, Compressed, Error, Result,
    quantization::{self, IntegerRange, ScaleRule},
};

/// Columns that share a scale under [`Granularity::Group`]: 64 kept values.
pub const GROUP: usize = 128;

/// The integers, and scales in f16.
const RANGE: IntegerRange = IntegerRange { largest: 7, lowest: -8, half_scales: true };

/// What is added to an integer that is stored in half a byte.
const OFFSET: i8 = 8;

/// What shares a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Granularity {
    /// A whole row.
    Row,
    /// [`GROUP`] columns of a row, the last of a row fewer.
    Group,
    /// 64 columns of a row, the last of a row fewer. On CPUs and in files; GPU kernels have the other two.
    Group64,
}

impl Granularity {
    /// Every granularity.
    pub const ALL: [Self; 3] = [Granularity::Row, Granularity::Group, Granularity::Group64];

    /// Columns that share a scale, where it is not a whole row.
    pub fn columns(self) -> Option<usize> {
        match self {
            Granularity::Row => None,
            Granularity::Group => Some(GROUP),
            Granularity::Group64 => Some(64),
        }
    }

    /// The granularity of groups of so many columns, where there is one.
    pub fn of_columns(columns: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|granularity| granularity.columns() == Some(columns))
    }

    /// Scales of a row of `cols` columns.
    pub fn scales_per_row(self, cols: usize) -> usize {
        self.columns().map_or(1, |columns| cols.div_ceil(columns))
    }

    /// Which of a row's scales a column has.
    pub fn scale_of(self, col: usize) -> usize {
        self.columns().map_or(0, |columns| col / columns)
    }
}

/// A 2:4 weight `[rows, cols]` of four-bit integers; see the [module](self).
///
/// ```
/// use twofour::{Compressed, MatrixRef, int4::{Granularity, Int4}};
/// let w = [0.0f32, 7.0, 0.0, -3.4, 1.0, 0.0, 0.0, 0.0];
/// let q = Int4::quantize(&Compressed::from_dense(MatrixRef::new(1, 8, &w)?)?, Granularity::Row)?;
/// assert_eq!(q.weight().values(), [7, -3, 1, 0]);
/// assert_eq!(q.dequantize().to_dense(), [0.0, 7.0, 0.0, -3.0, 1.0, 0.0, 0.0, 0.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Int4 {
    weight: Compressed<i8>,
    scales: Vec<f16>,
    granularity: Granularity,
}

impl Int4 {
    /// Rounds each kept value to the nearest multiple of its scale, ties to even; a scale is the largest magnitude that it serves, by 7, as f16.
    /// Where that is below f16's least positive number the values become zero. The mask stays: a value that rounds to zero keeps its place.
    ///
    /// # Errors
    /// Those of [`Int4::quantize_with`].
    pub fn quantize<T: Arithmetic>(weight: &Compressed<T>, granularity: Granularity) -> Result<Self> {
        Self::quantize_with(weight, granularity, ScaleRule::MaxAbs)
    }

    /// The same with a rule for the scales. Where a scale is below the one of [`ScaleRule::MaxAbs`], values are clipped to -8 and 7.
    ///
    /// # Errors
    /// [`Error::NotANumber`] and [`Error::Infinite`] with the place; [`Error::Scale`] where a scale is beyond f16.
    pub fn quantize_with<T: Arithmetic>(
        weight: &Compressed<T>,
        granularity: Granularity,
        rule: ScaleRule,
    ) -> Result<Self> {
        let integers = quantization::quantize(weight, granularity, RANGE, rule)?;
        let scales = integers.scales.iter().map(|scale| f16::from_f32(*scale)).collect();
        Ok(Self { weight: integers.weight, scales, granularity })
    }

    /// From integers and scales, `[rows, scales_per_row]`.
    ///
    /// # Errors
    /// [`Error::Length`] for the number of scales, [`Error::NotFourBits`] with the place of the first integer outside -8 to 7, [`Error::Scale`] for a
    /// scale that is not finite.
    pub fn from_parts(weight: Compressed<i8>, scales: Vec<f16>, granularity: Granularity) -> Result<Self> {
        let per_row = granularity.scales_per_row(weight.cols());
        let expected = weight.rows() * per_row;
        if scales.len() != expected {
            return Err(Error::Length { what: "scales of a four-bit weight", expected, found: scales.len() });
        }
        if let Some(i) = scales.iter().position(|scale| !scale.is_finite()) {
            return Err(Error::Scale { row: i / per_row, scale: i % per_row });
        }
        if let Some(i) = weight.values().iter().position(|q| !(-8..=7).contains(q)) {
            let kept = 2 * weight.groups();
            return Err(Error::NotFourBits { row: i / kept, group: i % kept / 2, value: weight.values()[i] });
        }
        Ok(Self { weight, scales, granularity })
    }

    /// From values as [`Int4::packed_values`] returns them, metadata words and scales.
    ///
    /// # Errors
    /// [`Error::Length`] where a slice does not fit the shape; those of [`Compressed::from_parts`] and [`Int4::from_parts`].
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

    /// The integers, two in a byte, `[rows, ceil(cols / 4)]`: those of a group, each plus 8, the first in the lower half.
    pub fn packed_values(&self) -> Vec<u8> {
        let half = |q: i8| (q + OFFSET) as u8;
        let pairs = self.weight.values().as_chunks::<2>().0;
        pairs.iter().map(|[first, second]| half(*first) | half(*second) << 4).collect()
    }

    /// Adds the rows of another weight below this one's.
    ///
    /// # Errors
    /// [`Error::Granularity`] for scales of another granularity; those of [`Compressed::append`].
    pub fn append(&mut self, mut below: Self) -> Result<()> {
        if below.granularity != self.granularity {
            let (expected, found) = (self.granularity.columns(), below.granularity.columns());
            return Err(Error::Granularity { expected, found });
        }
        self.weight.append(below.weight)?;
        self.scales.append(&mut below.scales);
        Ok(())
    }

    /// The weight that this stands for: integers times scales, exact in f32.
    pub fn dequantize(&self) -> Compressed<f32> {
        quantization::dequantize(&self.weight, |row, col| self.scale(row, col).to_f32())
    }

    /// The integers.
    pub fn weight(&self) -> &Compressed<i8> {
        &self.weight
    }

    /// The scales, `[rows, scales_per_row]`.
    pub fn scales(&self) -> &[f16] {
        &self.scales
    }

    /// The scale of a row's column.
    pub fn scale(&self, row: usize, col: usize) -> f16 {
        let per_row = self.granularity.scales_per_row(self.weight.cols());
        self.scales[row * per_row + self.granularity.scale_of(col)]
    }

    /// What shares a scale.
    pub fn granularity(&self) -> Granularity {
        self.granularity
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
