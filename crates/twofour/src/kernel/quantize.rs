//! Symmetric int8 quantisation, row by row: `scale = amax / 127`, rounding to nearest even.

use super::share::{MIN_PART, share_elements};
use crate::{Error, MatrixRef, Result};

/// Quantises a matrix row by row: the int8 values, `[rows, cols]`, and a scale for each row, `amax / 127` (0 for a row
/// of zeros). Zeros stay zeros, so a 2:4 matrix stays 2:4.
///
/// # Errors
/// [`Error::NotANumber`] or [`Error::Infinite`] with the place of the first value that is not finite.
pub fn quantize(matrix: MatrixRef<'_, f32>) -> Result<(Vec<i8>, Vec<f32>)> {
    for row in 0..matrix.rows() {
        if let Some(col) = matrix.row(row).iter().position(|v| !v.is_finite()) {
            let nan = matrix.row(row)[col].is_nan();
            return Err(if nan { Error::NotANumber { row, col } } else { Error::Infinite { row, col } });
        }
    }
    Ok(quantize_rows(matrix.data(), matrix.rows(), matrix.cols()))
}

/// Quantises `[rows, cols]` values. A row with a NaN or an infinity gets a scale of NaN, which makes every product with
/// it NaN.
pub(super) fn quantize_rows(values: &[f32], rows: usize, cols: usize) -> (Vec<i8>, Vec<f32>) {
    let (mut quantized, mut scales) = (vec![0; values.len()], vec![0.0; rows]);
    if cols > 0 {
        let rows = MIN_PART.div_ceil(cols);
        let elements = values.len();
        let parts = values.chunks(rows * cols).zip(quantized.chunks_mut(rows * cols)).zip(scales.chunks_mut(rows));
        share_elements(elements, parts, |((values, quantized), scales)| {
            let rows = values.chunks_exact(cols).zip(quantized.chunks_exact_mut(cols));
            rows.zip(scales).for_each(|((values, quantized), scale)| *scale = quantize_row(values, quantized));
        });
    }
    (quantized, scales)
}

/// Quantises a row, of which `quantized` is zero before, and returns its scale.
fn quantize_row(row: &[f32], quantized: &mut [i8]) -> f32 {
    // Magnitudes are ordered as their bits are, with NaN above all.
    let amax = f32::from_bits(row.iter().fold(0, |amax, v| amax.max(v.abs().to_bits())));
    let scale = amax / 127.0;
    if scale == 0.0 || !scale.is_finite() {
        return if scale == 0.0 { 0.0 } else { f32::NAN };
    }
    // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    for (q, v) in quantized.iter_mut().zip(row) {
        // Dividing, not multiplying by the inverse: the inverse of a subnormal scale is infinite. Such a scale is
        // rough, too, so that the quotient may exceed 127.
        *q = ((v / scale).clamp(-127.0, 127.0) + ROUND).to_bits() as i8;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn quantisation_is_within_half_a_step(
            row in proptest::collection::vec(prop_oneof![-1e3f32..1e3, Just(0.0), Just(-0.0), Just(1e-40), Just(3e-43)], 1..50)
        ) {
            let (values, scales) = quantize(MatrixRef::new(1, row.len(), &row).unwrap()).unwrap();
            for (v, q) in row.iter().zip(values) {
                prop_assert_eq!(q, if scales[0] == 0.0 { 0 } else { (v / scales[0]).round_ties_even().clamp(-127.0, 127.0) as i8 });
                prop_assert!((v - f32::from(q) * scales[0]).abs() <= 0.5001 * scales[0] + f32::MIN_POSITIVE);
            }
        }
    }

    #[test]
    fn ties_go_to_even_and_the_largest_is_127() {
        let (values, scales) = quantize(MatrixRef::new(1, 6, &[127.0, 0.5, 1.5, 2.5, -0.5, -126.5]).unwrap()).unwrap();
        assert_eq!((values, scales), (vec![127, 0, 2, 2, 0, -126], vec![1.0]));
    }

    #[test]
    fn what_is_not_finite_has_no_scale() {
        let (values, scales) = quantize_rows(&[1.0, f32::NAN, f32::INFINITY, 1.0, 2.0, -2.0], 3, 2);
        assert_eq!(values, [0, 0, 0, 0, 127, -127]);
        assert!(scales[0].is_nan() && scales[1].is_nan() && scales[2] == 2.0 / 127.0, "{scales:?}");
        let error = quantize(MatrixRef::new(1, 2, &[1.0, f32::INFINITY]).unwrap()).unwrap_err();
        assert!(matches!(error, Error::Infinite { row: 0, col: 1 }), "{error}");
    }
}
