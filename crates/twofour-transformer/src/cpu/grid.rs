//! Weights rounded to integers times scales, as a quantized layer computes with them.

use rayon::prelude::*;
use twofour::quantization::nearest;

/// Elements that a thread rounds at a time.
const PART: usize = 1 << 14;

/// Writes `clamp(round(w / s), -largest, largest) · s` to `rounded` for each element of a weight and its scale, ties to
/// even; +0.0 where the scale is zero.
///
/// The slices must have one length.
pub fn round(largest: f32, scales: &[f32], weight: &[f32], rounded: &mut [f32]) {
    let parts = rounded.par_chunks_mut(PART).zip(weight.par_chunks(PART)).zip(scales.par_chunks(PART));
    parts.for_each(|((rounded, weight), scales)| {
        for ((rounded, weight), scale) in rounded.iter_mut().zip(weight).zip(scales) {
            *rounded = nearest(*weight, *scale, -largest..=largest) * scale;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_go_to_the_nearest_multiple_ties_to_the_even_one() {
        let weight = [0.24, 0.25, 0.75, -0.26, 9.0, -9.0, 1.0, f32::NAN];
        let mut rounded = [7.0; 8];
        round(7.0, &[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 0.5], &weight, &mut rounded);
        assert_eq!(rounded[..7], [0.0, 0.0, 1.0, -0.5, 3.5, -3.5, 0.0]);
        assert!(rounded[7].is_nan());
        round(7.0, &[], &[], &mut []);
    }
}
