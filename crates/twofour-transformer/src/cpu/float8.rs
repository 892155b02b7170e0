//! Rounding to 8-bit floats with one scale for a tensor: what 8-bit GEMMs of a GPU multiply, as f32.

use rayon::prelude::*;
use twofour::{Arithmetic, F8E4M3, F8E5M2};

/// Elements of one task.
const TASK: usize = 1 << 14;

/// An 8-bit float, and its largest value.
pub trait Float8: Arithmetic {
    /// The largest finite value.
    const LARGEST: f32;
}

impl Float8 for F8E4M3 {
    const LARGEST: f32 = 448.0;
}

impl Float8 for F8E5M2 {
    const LARGEST: f32 = 57344.0;
}

/// The values that a tensor has after it is multiplied by `LARGEST / amax`, rounded, and divided by that factor again;
/// `amax` is its largest magnitude. Zeros stay zeros, and a tensor with a NaN or an infinity becomes NaN.
pub fn round<F: Float8>(values: &[f32]) -> Vec<f32> {
    // As bits, magnitudes are ordered as numbers are, and a NaN is above infinity.
    let largest = |values: &[f32]| values.iter().map(|v| v.to_bits() & 0x7FFF_FFFF).max().unwrap_or(0);
    let amax = f32::from_bits(values.par_chunks(TASK).map(largest).max().unwrap_or(0));
    let factor = match amax {
        0.0 => 1.0,
        amax if amax.is_finite() => (F::LARGEST / amax).min(f32::MAX / 2.0),
        _ => f32::NAN,
    };
    let scale = 1.0 / factor;
    values.par_iter().with_min_len(TASK).map(|v| F::from_f32(v * factor).to_f32() * scale).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_exact_and_others_are_near() {
        let values: Vec<f32> = (0..100_000).map(|i| (i as f32 * 0.7).sin() * 3e-5).collect();
        for (rounded, bound) in [(round::<F8E4M3>(&values), 1.0 / 16.0), (round::<F8E5M2>(&values), 1.0 / 8.0)] {
            for (rounded, value) in rounded.iter().zip(&values) {
                assert!((rounded - value).abs() <= bound * value.abs() + 1e-10, "{value}: {rounded}");
            }
        }
        let few = round::<F8E4M3>(&[0.3, -0.1, 0.0]);
        assert!((few[0] - 0.3).abs() < 1e-7 && few[1] < 0.0 && few[2] == 0.0);
    }

    #[test]
    fn zeros_stay_and_what_is_not_finite_is_not_hidden() {
        assert_eq!(round::<F8E5M2>(&[0.0, -0.0, 0.0]), [0.0; 3]);
        assert_eq!(round::<F8E5M2>(&[]), [0f32; 0]);
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(round::<F8E4M3>(&[1.0, bad]).iter().all(|v| v.is_nan()));
        }
        // The quotient of the largest value and a tiny magnitude is not finite.
        assert!(round::<F8E5M2>(&[f32::MIN_POSITIVE, 1e-45]).iter().all(|v| v.is_finite()));
    }
}
