//! 2:4 weights in eight bits: kept values as integers from -127 to 127, with a scale for each row or for some of its columns.
//!
//! `w ≈ q · scale`, symmetric: no zero points, so what is pruned stays zero.

use half::f16;

use crate::{
    Arithmetic, Compressed, Error, Result,
    int4::Granularity,
    quantization::{self, IntegerRange, ScaleRule},
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
#[derive(Debug, Clone, PartialEq)]
pub struct Int8 {
    weight: Compressed<i8>,
    scales: Vec<f32>,
    granularity: Granularity,
}

fn range(granularity: Granularity) -> IntegerRange {
    IntegerRange { largest: 127, lowest: -127, half_scales: granularity != Granularity::Row }
}

impl Int8 {
    /// Rounds each kept value to the nearest multiple of its scale, ties to even; a scale is the largest magnitude that it serves, by 127. The mask
    /// stays: a value that rounds to zero keeps its place.
    ///
    /// # Errors
    /// Those of [`Int8::quantize_with`].
    pub fn quantize<T: Arithmetic>(weight: &Compressed<T>, granularity: Granularity) -> Result<Self> {
        Self::quantize_with(weight, granularity, ScaleRule::MaxAbs)
    }

    /// The same with a rule for the scales.
    ///
    /// # Errors
    /// [`Error::NotANumber`] and [`Error::Infinite`] with the place; [`Error::Scale`] where the scale of a group is beyond f16.
    pub fn quantize_with<T: Arithmetic>(
        weight: &Compressed<T>,
        granularity: Granularity,
        rule: ScaleRule,
    ) -> Result<Self> {
        let integers = quantization::quantize(weight, granularity, range(granularity), rule)?;
        Ok(Self { weight: integers.weight, scales: integers.scales, granularity })
    }

    /// From integers and scales, `[rows, scales_per_row]`.
    ///
    /// # Errors
    /// [`Error::Length`] for the number of scales, [`Error::Scale`] for one that is not finite or, of a group, not an f16.
    pub fn from_parts(weight: Compressed<i8>, scales: Vec<f32>, granularity: Granularity) -> Result<Self> {
        let per_row = granularity.scales_per_row(weight.cols());
        let expected = weight.rows() * per_row;
        if scales.len() != expected {
            return Err(Error::Length { what: "scales of an eight-bit weight", expected, found: scales.len() });
        }
        let is_stored = |scale: f32| granularity == Granularity::Row || f16::from_f32(scale).to_f32() == scale;
        if let Some(i) = scales.iter().position(|scale| !scale.is_finite() || !is_stored(*scale)) {
            return Err(Error::Scale { row: i / per_row, scale: i % per_row });
        }
        Ok(Self { weight, scales, granularity })
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

    /// The weight that this stands for: integers times scales.
    pub fn dequantize(&self) -> Compressed<f32> {
        quantization::dequantize(&self.weight, |row, col| self.scale(row, col))
    }

    /// The integers.
    pub fn weight(&self) -> &Compressed<i8> {
        &self.weight
    }

    /// The scales, `[rows, scales_per_row]`.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// The scale of a row's column.
    pub fn scale(&self, row: usize, col: usize) -> f32 {
        let per_row = self.granularity.scales_per_row(self.weight.cols());
        self.scales[row * per_row + self.granularity.scale_of(col)]
    }

    /// What shares a scale.
    pub fn granularity(&self) -> Granularity {
        self.granularity
    }

    /// The integers and the scales, given up.
    pub fn into_parts(self) -> (Compressed<i8>, Vec<f32>) {
        (self.weight, self.scales)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MatrixRef;

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
