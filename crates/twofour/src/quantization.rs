//! Rounding the kept values of a 2:4 weight to integers with symmetric scales: what [`crate::int4`] and [`crate::int8`]
//! share.
//!
//! `w ≈ q · scale`, without zero points, so what is pruned stays zero. The mask stays, too: a kept value that rounds to
//! zero keeps its place, as an integer 0 that is stored.

use std::ops::RangeInclusive;

use half::f16;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::{Arithmetic, Compressed, Error, MatrixRef, Result, compressed::code, first_error::first_error};

/// Columns that share a scale under [`Granularity::Group`]: 64 kept values.
pub const GROUP: usize = 128;

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

/// How a scale follows from the values that share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ScaleRule {
    /// The largest magnitude becomes the largest integer: nothing is clipped.
    #[default]
    MaxAbs,
    /// Of 33 scales from that one down to half of it, the one with the least sum of squared errors; values beyond the
    /// largest integer are clipped to it. Of equal sums the larger scale.
    LeastSquares,
}

impl ScaleRule {
    /// The shares of the largest magnitude that become the largest integer.
    pub(crate) fn shares(self) -> impl Iterator<Item = f32> {
        const STEPS: usize = 64;
        let count = if self == ScaleRule::MaxAbs { 1 } else { STEPS / 2 + 1 };
        (0..count).map(|i| (STEPS - i) as f32 / STEPS as f32)
    }
}

/// A kind of integers: [`FourBits`](crate::int4::FourBits) or [`EightBits`](crate::int8::EightBits).
pub trait Integers: Clone + Copy + std::fmt::Debug + PartialEq + Send + Sync + 'static {
    /// The type in which scales are kept.
    type Scale: Copy + std::fmt::Debug + PartialEq + Into<f32> + Send + Sync;

    /// What errors call the scales.
    const SCALES: &'static str;

    /// The range of the integers, and the type of the scales in a file.
    fn range(granularity: Granularity) -> IntegerRange;

    /// A scale in the type in which it is kept.
    fn stored(scale: f32) -> Self::Scale;

    /// Whether a file holds the scale as it is.
    fn is_stored(scale: f32, granularity: Granularity) -> bool {
        let _ = (scale, granularity);
        true
    }

    /// Checks that integers of eight bits are of this kind.
    ///
    /// # Errors
    /// [`Error::NotFourBits`] with the place of the first that is not.
    fn check(weight: &Compressed<i8>) -> Result<()> {
        let _ = weight;
        Ok(())
    }
}

/// A 2:4 weight `[rows, cols]` of integers with symmetric scales: an [`Int4`](crate::int4::Int4) or an
/// [`Int8`](crate::int8::Int8).
#[derive(Debug, Clone, PartialEq)]
pub struct Quantized<I: Integers> {
    weight: Compressed<i8>,
    scales: Vec<I::Scale>,
    granularity: Granularity,
}

impl<I: Integers> Quantized<I> {
    /// Rounds each kept value to the nearest multiple of its scale, ties to even; a scale is the largest magnitude that
    /// it serves, by the largest integer. The mask stays: a value that rounds to zero keeps its place.
    ///
    /// # Errors
    /// Those of [`Quantized::quantize_with`].
    pub fn quantize<T: Arithmetic>(weight: &Compressed<T>, granularity: Granularity) -> Result<Self> {
        Self::quantize_with(weight, granularity, ScaleRule::MaxAbs)
    }

    /// The same with a rule for the scales.
    ///
    /// # Errors
    /// [`Error::NotANumber`] and [`Error::Infinite`] with the place; [`Error::Scale`] where a scale is beyond the type
    /// in which it is stored.
    pub fn quantize_with<T: Arithmetic>(
        weight: &Compressed<T>,
        granularity: Granularity,
        rule: ScaleRule,
    ) -> Result<Self> {
        let (weight, scales) = quantize(weight, granularity, I::range(granularity), rule)?;
        Ok(Self { weight, scales: scales.into_iter().map(I::stored).collect(), granularity })
    }

    /// From integers and scales, `[rows, scales_per_row]`.
    ///
    /// # Errors
    /// [`Error::Length`] for the number of scales, [`Error::Scale`] for one that is not finite or that no file holds,
    /// [`Error::NotFourBits`] with the place of the first integer that four bits do not hold, where they should.
    pub fn from_parts(weight: Compressed<i8>, scales: Vec<I::Scale>, granularity: Granularity) -> Result<Self> {
        let per_row = granularity.scales_per_row(weight.cols());
        let expected = weight.rows() * per_row;
        if scales.len() != expected {
            return Err(Error::Length { what: I::SCALES, expected, found: scales.len() });
        }
        let is_sound = |scale: f32| scale.is_finite() && I::is_stored(scale, granularity);
        if let Some(i) = scales.iter().position(|scale| !is_sound((*scale).into())) {
            return Err(Error::Scale { row: i / per_row, scale: i % per_row });
        }
        I::check(&weight)?;
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
        dequantize(&self.weight, |row, col| self.scale(row, col).into())
    }

    /// The scale of each element, `[rows, cols]`: 0 where the weight is pruned.
    pub fn scales_of_elements(&self) -> Vec<f32> {
        let (mask, cols) = (self.weight.mask(), self.weight.cols());
        let scale =
            |i: usize| if mask.is_kept(i / cols, i % cols) { self.scale(i / cols, i % cols).into() } else { 0.0 };
        (0..self.weight.rows() * cols).map(scale).collect()
    }

    /// The weight of the integers nearest to other values `[rows, cols]`, under the same mask and scales: ties to even,
    /// beyond the largest integer that integer, 0 for a NaN.
    ///
    /// # Errors
    /// [`Error::Length`] for other than one value for each element.
    pub fn nearest_to(&self, values: &[f32]) -> Result<Self> {
        let (rows, cols) = (self.weight.rows(), self.weight.cols());
        if values.len() != rows * cols {
            let what = "values for a quantized weight";
            return Err(Error::Length { what, expected: rows * cols, found: values.len() });
        }
        let range = I::range(self.granularity);
        let nearest = |(i, value): (usize, &f32)| range.round(*value, self.scale(i / cols, i % cols).into());
        let integers: Vec<i8> = values.iter().enumerate().map(nearest).collect();
        let weight = Compressed::from_masked(MatrixRef::new(rows, cols, &integers)?, &self.weight.mask())?;
        Ok(Quantized { weight, scales: self.scales.clone(), granularity: self.granularity })
    }

    /// The integers.
    pub fn weight(&self) -> &Compressed<i8> {
        &self.weight
    }

    /// The scales, `[rows, scales_per_row]`.
    pub fn scales(&self) -> &[I::Scale] {
        &self.scales
    }

    /// The scale of a row's column.
    pub fn scale(&self, row: usize, col: usize) -> I::Scale {
        let per_row = self.granularity.scales_per_row(self.weight.cols());
        self.scales[row * per_row + self.granularity.scale_of(col)]
    }

    /// What shares a scale.
    pub fn granularity(&self) -> Granularity {
        self.granularity
    }

    /// The integers and the scales, given up.
    pub fn into_parts(self) -> (Compressed<i8>, Vec<I::Scale>) {
        (self.weight, self.scales)
    }
}

/// Returns the integer of a range that is nearest to `value / scale`, ties to even: 0 where the scale is 0, whatever the
/// value, and otherwise NaN for NaN. The range must have a start that is not above its end.
pub fn nearest(value: f32, scale: f32, range: RangeInclusive<f32>) -> f32 {
    if scale == 0.0 {
        return 0.0;
    }
    // Dividing, not multiplying by the inverse: the inverse of a subnormal scale is infinite.
    (value / scale).round_ties_even().clamp(*range.start(), *range.end())
}

/// The range of an integer type and the type of its scales.
#[derive(Debug, Clone, Copy)]
pub struct IntegerRange {
    /// The integer that the largest magnitude becomes.
    pub largest: i8,
    /// The lowest integer.
    pub lowest: i8,
    /// Whether scales are f16, so that a value is rounded with the scale that is stored.
    pub half_scales: bool,
}

impl IntegerRange {
    /// The scale as it is stored.
    fn stored(self, scale: f32) -> f32 {
        if self.half_scales { f16::from_f32(scale).to_f32() } else { scale }
    }

    fn round(self, value: f32, scale: f32) -> i8 {
        nearest(value, scale, f32::from(self.lowest)..=f32::from(self.largest)) as i8
    }

    /// The scale of some values, whose largest magnitude is `amax`.
    fn scale(self, values: &[f32], amax: f32, rule: ScaleRule) -> f32 {
        let scale = |share: f32| self.stored(amax * share / f32::from(self.largest));
        if rule == ScaleRule::MaxAbs {
            return scale(1.0);
        }
        let error = |scale: f32| -> f64 {
            let squared = |v: &f32| (f64::from(*v) - f64::from(self.round(*v, scale)) * f64::from(scale)).powi(2);
            values.iter().map(squared).sum()
        };
        let candidates = rule.shares().map(scale).map(|scale| (scale, error(scale)));
        candidates.reduce(|best, other| if other.1 < best.1 { other } else { best }).map_or(0.0, |(scale, _)| scale)
    }
}

/// Rounds the kept values of a weight to nearest, ties to even; returns the integers at the weight's positions, and the
/// scales, `[rows, scales_per_row]`.
///
/// # Errors
/// [`Error::NotANumber`] and [`Error::Infinite`] with the place; [`Error::Scale`] where a scale is not a finite number
/// of its type.
fn quantize<T: Arithmetic>(
    weight: &Compressed<T>,
    granularity: Granularity,
    range: IntegerRange,
    rule: ScaleRule,
) -> Result<(Compressed<i8>, Vec<f32>)> {
    let (rows, kept) = (weight.rows(), 2 * weight.groups());
    let per_row = granularity.scales_per_row(weight.cols());
    let (mut values, mut scales) = (vec![0; rows * kept], vec![0.0; rows * per_row]);
    let shared = granularity.columns().map_or(kept, |columns| columns / 2).max(1);
    // A weight without columns has no parts.
    let parts = values.par_chunks_mut(kept.max(1)).zip(scales.par_chunks_mut(per_row.max(1)));
    first_error(parts.enumerate(), |(row, (integers, scales))| {
        let floats: Vec<f32> = weight.values_row(row).iter().map(|v| v.to_f32()).collect();
        let groups = floats.chunks(shared).zip(integers.chunks_mut(shared)).zip(scales);
        for (i, ((values, integers), scale)) in groups.enumerate() {
            let mut amax = 0.0f32;
            for (j, value) in values.iter().enumerate() {
                if !value.is_finite() {
                    return Err(not_finite(weight, row, i * shared + j, *value));
                }
                amax = amax.max(value.abs());
            }
            *scale = range.scale(values, amax, rule);
            if !scale.is_finite() {
                return Err(Error::Scale { row, scale: i });
            }
            integers.iter_mut().zip(values).for_each(|(q, value)| *q = range.round(*value, *scale));
        }
        Ok(())
    })?;
    let weight = Compressed::from_trusted_parts(rows, weight.cols(), values, weight.meta().to_vec());
    Ok((weight, scales))
}

/// The error for the kept value `kept` of a row.
fn not_finite<T: Arithmetic>(weight: &Compressed<T>, row: usize, kept: usize, value: f32) -> Error {
    let (first, second) = code::positions(weight.code(row, kept / 2));
    let col = kept / 2 * 4 + if kept.is_multiple_of(2) { first } else { second };
    if value.is_nan() { Error::NotANumber { row, col } } else { Error::Infinite { row, col } }
}

/// The weight that integers with scales stand for: their products, exact in f32 for f16 scales.
fn dequantize(weight: &Compressed<i8>, scale: impl Fn(usize, usize) -> f32) -> Compressed<f32> {
    let kept = 2 * weight.groups();
    let value = |(i, q): (usize, &i8)| f32::from(*q) * scale(i / kept, i % kept / 2 * 4);
    // Without the sign of a zero, which a negative scale would leave: the compressed form has one zero.
    let values = weight.values().iter().enumerate().map(value).map(|v| if v == 0.0 { 0.0 } else { v }).collect();
    Compressed::from_trusted_parts(weight.rows(), weight.cols(), values, weight.meta().to_vec())
}

/// `‖W − Ŵ‖ / ‖W‖` in the Frobenius norm, of a weight and what stands for it at the same positions; 0 for a weight of
/// zeros.
///
/// # Errors
/// [`Error::Shape`] where the shapes differ.
pub fn relative_error<T: Arithmetic>(weight: &Compressed<T>, quantized: &Compressed<f32>) -> Result<f64> {
    let (expected, found) = ((weight.rows(), weight.cols()), (quantized.rows(), quantized.cols()));
    if expected != found {
        return Err(Error::Shape { what: "quantized weight", expected, found });
    }
    Ok(SquaredError::of(weight, quantized).relative())
}

/// `‖W − Ŵ‖²` and `‖W‖²`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SquaredError {
    error: f64,
    norm: f64,
}

impl SquaredError {
    /// Of a weight and what stands for it at the same positions.
    pub(crate) fn of<T: Arithmetic>(weight: &Compressed<T>, quantized: &Compressed<f32>) -> Self {
        let mut sums = Self::default();
        weight.values().iter().zip(quantized.values()).for_each(|(w, q)| sums.add(w.to_f32(), *q));
        sums
    }

    /// Adds an element and what stands for it.
    pub(crate) fn add(&mut self, w: f32, q: f32) {
        let w = f64::from(w);
        self.error += (w - f64::from(q)).powi(2);
        self.norm += w * w;
    }

    pub(crate) fn and(self, other: Self) -> Self {
        SquaredError { error: self.error + other.error, norm: self.norm + other.norm }
    }

    /// `‖W − Ŵ‖ / ‖W‖`; 0 for a weight of zeros.
    pub(crate) fn relative(self) -> f64 {
        if self.norm == 0.0 { 0.0 } else { (self.error / self.norm).sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mask, MatrixRef, int4::Int4, int8::Int8};
    use proptest::prelude::*;

    fn weight(rows: usize, cols: usize, data: &[f32]) -> Compressed<f32> {
        Compressed::from_pruned(MatrixRef::new(rows, cols, data).unwrap()).unwrap()
    }

    const GRANULARITIES: [Granularity; 3] = [Granularity::Row, Granularity::Group, Granularity::Group64];

    proptest! {
        #[test]
        fn the_mask_stays_and_a_searched_scale_is_never_worse(
            (rows, cols, data) in (0usize..5, 0usize..300).prop_flat_map(|(r, c)| {
                let value = prop_oneof![8 => -1f32..1.0, 1 => Just(0.0), 1 => Just(-0.0), 1 => -1e-9f32..1e-9, 1 => Just(40.0)];
                (Just(r), Just(c), proptest::collection::vec(value, r * c))
            }),
        ) {
            let weight = weight(rows, cols, &data);
            for granularity in GRANULARITIES {
                let four = |rule| Int4::quantize_with(&weight, granularity, rule).unwrap();
                let eight = |rule| Int8::quantize_with(&weight, granularity, rule).unwrap();
                let error = |q: &Compressed<f32>| relative_error(&weight, q).unwrap();
                for (plain, searched) in [
                    (four(ScaleRule::MaxAbs).dequantize(), four(ScaleRule::LeastSquares).dequantize()),
                    (eight(ScaleRule::MaxAbs).dequantize(), eight(ScaleRule::LeastSquares).dequantize()),
                ] {
                    prop_assert_eq!(plain.meta(), weight.meta());
                    prop_assert_eq!(searched.meta(), weight.meta());
                    prop_assert!(error(&searched) <= error(&plain) * (1.0 + 1e-9));
                    prop_assert!(plain.values().iter().chain(searched.values()).all(|v| v.to_bits() != (-0.0f32).to_bits()));
                    for (v, w) in plain.values().iter().zip(weight.values()) {
                        prop_assert!(*w != 0.0 || *v == 0.0);
                    }
                }
            }
        }
    }

    #[test]
    fn a_value_that_rounds_to_zero_keeps_its_place() {
        let mut data = vec![0.0f32; 8];
        (data[2], data[3], data[5], data[7]) = (1e-6, 7.0, -1e-6, 1e-6);
        let weight = weight(1, 8, &data);
        let q = Int4::quantize(&weight, Granularity::Row).unwrap();
        assert_eq!((q.weight().values(), q.weight().meta()), (&[0, 7, 0, 0][..], weight.meta()));
    }

    #[test]
    fn the_integers_nearest_to_other_values_keep_mask_and_scales() {
        let data: Vec<f32> = (0..2 * 130).map(|i| if i % 130 % 4 < 2 { (i as f32).sin() } else { 0.0 }).collect();
        let weight = weight(2, 130, &data);
        for granularity in GRANULARITIES {
            let own = Int4::quantize(&weight, granularity).unwrap();
            let scales = own.scales_of_elements();
            let of = |row: usize, col: usize| scales[row * 130 + col];
            assert!((0..2).all(|row| (0..130).all(|col| match col % 4 < 2 {
                true => of(row, col) == own.scale(row, col).to_f32(),
                false => of(row, col) == 0.0,
            })));
            assert_eq!(own.nearest_to(&own.dequantize().to_dense()).unwrap(), own);
            // What the mask prunes stays so, and what is too large becomes the largest integer.
            let far: Vec<f32> = (0..260).map(|i| if i % 2 == 0 { 100.0 } else { f32::NAN }).collect();
            let other = own.nearest_to(&far).unwrap();
            assert_eq!((other.scales(), other.weight().meta()), (own.scales(), own.weight().meta()));
            assert!(other.weight().values().chunks(2).all(|pair| *pair == [7, 0]));
            assert!(matches!(own.nearest_to(&far[1..]), Err(Error::Length { expected: 260, found: 259, .. })));
        }
    }

    #[test]
    fn clipping_pays_where_one_value_is_far_out() {
        let mut data: Vec<f32> = (0..128).map(|i| if i % 4 < 2 { (i as f32 * 0.7).sin() * 0.5 } else { 0.0 }).collect();
        data[0] = 2.0;
        let weight = weight(1, 128, &data);
        let error = |rule| {
            relative_error(&weight, &Int4::quantize_with(&weight, Granularity::Group, rule).unwrap().dequantize())
                .unwrap()
        };
        assert!(error(ScaleRule::LeastSquares) < 0.9 * error(ScaleRule::MaxAbs));
    }

    #[test]
    fn what_is_not_finite_is_refused_with_its_place() {
        for granularity in GRANULARITIES {
            let refused = |at: usize, value: f32| {
                let mut data = vec![0.0f32; 2 * 132];
                data[at] = value;
                let mask = Mask::from_fn(2, 132, |_, col| matches!(col % 4, 1 | 3));
                let weight = Compressed::from_masked(MatrixRef::new(2, 132, &data).unwrap(), &mask).unwrap();
                (Int4::quantize(&weight, granularity).unwrap_err(), Int8::quantize(&weight, granularity).unwrap_err())
            };
            let (four, eight) = refused(132 + 131, f32::NAN);
            assert!(matches!(four, Error::NotANumber { row: 1, col: 131 }), "{four}");
            assert!(matches!(eight, Error::NotANumber { row: 1, col: 131 }), "{eight}");
            let (four, eight) = refused(65, f32::NEG_INFINITY);
            assert!(matches!(four, Error::Infinite { row: 0, col: 65 }), "{four}");
            assert!(matches!(eight, Error::Infinite { row: 0, col: 65 }), "{eight}");
        }
    }
}
