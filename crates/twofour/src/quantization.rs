//! Rounding the kept values of a 2:4 weight to integers with symmetric scales: what [`crate::int4`] and [`crate::int8`] share.
//!
//! `w ≈ q · scale`, without zero points, so what is pruned stays zero. The mask stays, too: a kept value that rounds to zero keeps its place, as an
//! integer 0 that is stored.

use half::f16;
use rayon::prelude::*;

use crate::{Arithmetic, Compressed, Error, Result, compressed::code, first_error::first_error, int4::Granularity};

/// How a scale follows from the values that share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ScaleRule {
    /// The largest magnitude becomes the largest integer: nothing is clipped.
    #[default]
    MaxAbs,
    /// Of 33 scales from that one down to half of it, the one with the least sum of squared errors; values beyond the largest integer are clipped to
    /// it. Of equal sums the larger scale.
    LeastSquares,
}

impl ScaleRule {
    /// The shares of the largest magnitude that become the largest integer.
    fn shares(self) -> impl Iterator<Item = f32> {
        const STEPS: usize = 64;
        let count = if self == ScaleRule::MaxAbs { 1 } else { STEPS / 2 + 1 };
        (0..count).map(|i| (STEPS - i) as f32 / STEPS as f32)
    }
}

/// The range of an integer type and the type of its scales.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IntegerRange {
    /// The integer that the largest magnitude becomes.
    pub(crate) largest: i8,
    /// The lowest integer.
    pub(crate) lowest: i8,
    /// Whether scales are f16, so that a value is rounded with the scale that is stored.
    pub(crate) half_scales: bool,
}

impl IntegerRange {
    /// The scale as it is stored.
    fn stored(self, scale: f32) -> f32 {
        if self.half_scales { f16::from_f32(scale).to_f32() } else { scale }
    }

    fn round(self, value: f32, scale: f32) -> i8 {
        if scale == 0.0 {
            return 0;
        }
        // Dividing, not multiplying by the inverse: the inverse of a subnormal scale is infinite.
        (value / scale).round_ties_even().clamp(f32::from(self.lowest), f32::from(self.largest)) as i8
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

/// Integers and scales.
pub(crate) struct Integers {
    /// The integers, at the weight's positions.
    pub(crate) weight: Compressed<i8>,
    /// `[rows, scales_per_row]`.
    pub(crate) scales: Vec<f32>,
}

/// Rounds the kept values of a weight to nearest, ties to even.
///
/// # Errors
/// [`Error::NotANumber`] and [`Error::Infinite`] with the place; [`Error::Scale`] where a scale is not a finite number of its type.
pub(crate) fn quantize<T: Arithmetic>(
    weight: &Compressed<T>,
    granularity: Granularity,
    range: IntegerRange,
    rule: ScaleRule,
) -> Result<Integers> {
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
    Ok(Integers { weight, scales })
}

/// The error for the kept value `kept` of a row.
fn not_finite<T: Arithmetic>(weight: &Compressed<T>, row: usize, kept: usize, value: f32) -> Error {
    let (first, second) = code::positions(weight.code(row, kept / 2));
    let col = kept / 2 * 4 + if kept.is_multiple_of(2) { first } else { second };
    if value.is_nan() { Error::NotANumber { row, col } } else { Error::Infinite { row, col } }
}

/// The weight that integers with scales stand for: their products, exact in f32 for f16 scales.
pub(crate) fn dequantize(weight: &Compressed<i8>, scale: impl Fn(usize, usize) -> f32) -> Compressed<f32> {
    let kept = 2 * weight.groups();
    let value = |(i, q): (usize, &i8)| f32::from(*q) * scale(i / kept, i % kept / 2 * 4);
    // Without the sign of a zero, which a negative scale would leave: the compressed form has one zero.
    let values = weight.values().iter().enumerate().map(value).map(|v| if v == 0.0 { 0.0 } else { v }).collect();
    Compressed::from_trusted_parts(weight.rows(), weight.cols(), values, weight.meta().to_vec())
}

/// `‖W − Ŵ‖ / ‖W‖` in the Frobenius norm, of a weight and what stands for it at the same positions; 0 for a weight of zeros.
///
/// # Errors
/// [`Error::Shape`] where the shapes differ.
pub fn relative_error<T: Arithmetic>(weight: &Compressed<T>, quantized: &Compressed<f32>) -> Result<f64> {
    let (expected, found) = ((weight.rows(), weight.cols()), (quantized.rows(), quantized.cols()));
    if expected != found {
        return Err(Error::Shape { what: "quantized weight", expected, found });
    }
    let pairs = weight.values().iter().zip(quantized.values());
    let sums = pairs.fold((0.0, 0.0), |(error, norm), (w, q)| {
        let w = f64::from(w.to_f32());
        (error + (w - f64::from(*q)).powi(2), norm + w * w)
    });
    Ok(if sums.1 == 0.0 { 0.0 } else { (sums.0 / sums.1).sqrt() })
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
