//! Pruning to `N:4` in one pass over a weight.

use rayon::prelude::*;

/// Writes a weight with rows of `cols` elements to `kept`, with zeros in place of all but the `count` largest
/// magnitudes of every group of four in a row. Of equal magnitudes the lower index is kept; a NaN counts as the
/// largest. A last group of fewer elements is one whose others are zero.
///
/// The slices must have one length, a multiple of `cols`.
pub fn keep(count: u32, weight: &[f32], cols: usize, kept: &mut [f32]) {
    let cols = cols.max(1);
    kept.par_chunks_mut(cols).zip(weight.par_chunks(cols)).for_each(|(kept, weight)| {
        for (kept, group) in kept.chunks_mut(4).zip(weight.chunks(4)) {
            let magnitude = |i: usize| group[i].to_bits() & 0x7FFF_FFFF;
            for (i, kept) in kept.iter_mut().enumerate() {
                let precedes = |j: &usize| (magnitude(*j), i) > (magnitude(i), *j);
                let rank = (0..group.len()).filter(precedes).count() as u32;
                *kept = if rank < count { group[i] } else { 0.0 };
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_magnitudes_are_kept_and_ties_go_to_the_lower_index() {
        let weight = [1.0, -3.0, 2.0, -0.5, 1.0, -1.0, 1.0, 1.0, 0.0, -0.0];
        let of = |count| {
            let mut kept = [9.0; 20];
            keep(count, &[weight, weight].concat(), 10, &mut kept);
            assert_eq!(kept[..10], kept[10..]);
            kept[..10].to_vec()
        };
        assert_eq!(of(3), [1.0, -3.0, 2.0, 0.0, 1.0, -1.0, 1.0, 0.0, 0.0, 0.0]);
        assert_eq!(of(2), [0.0, -3.0, 2.0, 0.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(of(4), weight);
        let mut kept = [0.0; 4];
        keep(1, &[1.0, f32::INFINITY, f32::NAN, 2.0], 4, &mut kept);
        assert!(kept[2].is_nan() && kept[1] == 0.0);
    }
}
