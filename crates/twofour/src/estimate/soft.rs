//! Thresholds, hard and soft.

use crate::{Element, MatrixRef, Result, select::nm};

/// The two largest magnitudes, ties to the lower index, as bits.
pub(super) fn two_largest(four: [f32; 4]) -> u8 {
    nm::best(&four.map(f32::abs), 2) as u8
}

/// The two largest magnitudes, each less the third largest.
pub(super) fn threshold(four: [f32; 4]) -> (u8, [f32; 4]) {
    let bits = two_largest(four);
    let dropped = |i: usize| if bits >> i & 1 == 0 { four[i].abs() } else { 0.0 };
    let third = (0..4).map(dropped).fold(0.0, f32::max);
    (bits, four.map(|v| (v.abs() - third).copysign(v)))
}

/// The factor `β = ⟨w, S(w)⟩ / ⟨S(w), S(w)⟩` that brings a soft threshold's result nearest to the weight itself, for
/// the whole `[rows, cols]` matrix; sums are in f64. 1 where nothing is left of the weight. To be computed once, after
/// initialisation, and kept: β of every step makes masks flip without end (Hu et al., S-STE, NeurIPS 2024).
///
/// # Errors
/// Those of [`super::estimate`].
pub fn soft_threshold_scale<T: Element>(matrix: MatrixRef<'_, T>) -> Result<f32> {
    super::expect_numbers(matrix, super::Estimator::SoftThreshold)?;
    let (mut along, mut own) = (0f64, 0f64);
    for row in 0..if matrix.cols() == 0 { 0 } else { matrix.rows() } {
        for group in matrix.row(row).chunks(4) {
            let mut four = [0f32; 4];
            four.iter_mut().zip(group).for_each(|(to, from)| *to = from.to_f32());
            let (bits, values) = threshold(four);
            for i in (0..4).filter(|i| bits >> i & 1 == 1) {
                along += f64::from(four[i]) * f64::from(values[i]);
                own += f64::from(values[i]) * f64::from(values[i]);
            }
        }
    }
    Ok(if own > 0.0 { (along / own) as f32 } else { 1.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_third_largest_is_taken_off() {
        let of = |four| {
            let (bits, values) = threshold(four);
            std::array::from_fn(|i| if bits >> i & 1 == 1 { values[i] } else { 0.0 })
        };
        assert_eq!(of([1.0, -5.0, 2.0, 3.0]), [0.0, -3.0, 0.0, 1.0]);
        // A tie for the second place leaves nothing of it, so nothing jumps where the order changes.
        assert_eq!(of([2.0, -2.0, 4.0, 1.0]), [0.0, 0.0, 2.0, 0.0]);
        assert_eq!(of([0.0; 4]), [0.0; 4]);
        // Between any two groups the estimates differ by no more than three times what the groups do.
        let (a, b) = ([1.0f32, 0.999, -0.5, 0.998], [1.0f32, 0.998, -0.5, 0.999]);
        assert!((0..4).all(|i| (of(a)[i] - of(b)[i]).abs() <= 0.0031), "{:?} {:?}", of(a), of(b));
    }

    /// The peers' simulation for Gaussian weights: 1.484.
    #[test]
    fn the_scale_of_gaussian_weights() {
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) as f64 + 0.5) / 2f64.powi(31)
        };
        let mut gaussian = || (-2.0 * uniform().ln()).sqrt() * (2.0 * std::f64::consts::PI * uniform()).cos();
        let w: Vec<f32> = (0..400_000).map(|_| gaussian() as f32).collect();
        let scale = soft_threshold_scale(MatrixRef::new(400, 1000, &w).unwrap()).unwrap();
        assert!((scale - 1.484).abs() < 0.01, "{scale}");
        assert_eq!(soft_threshold_scale(MatrixRef::new(1, 4, &[1f32; 4]).unwrap()).unwrap(), 1.0);
    }
}
