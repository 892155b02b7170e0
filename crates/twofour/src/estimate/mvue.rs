//! Minimum-variance unbiased estimators of a group by two of its elements.
//!
//! An element that is kept with probability `p` is divided by it, so that its mean is the element (Horvitz and
//! Thompson, 1952). Magnitudes are made eight times smaller first, so that no sum overflows; probabilities do not see
//! it.

use super::soft::two_largest;

/// What is kept, and with which values, given two uniform numbers: the first element is drawn in proportion to its
/// magnitude, the second from the others likewise.
///
/// With magnitudes `m`, their sum `s` and the sums `r` of the others, the probability of being drawn is `m/s (1 + Σ
/// mⱼ/rⱼ)`, where the sum is over the other elements. So what an element becomes does not depend on its own magnitude
/// but through that sum.
pub(super) fn approximate(four: [f32; 4], uniform: [f32; 2]) -> (u8, [f32; 4]) {
    let magnitudes = four.map(|v| v.abs() * 0.125);
    let (sum, others) = sums(magnitudes);
    let first = draw(magnitudes, None, uniform[0] * sum);
    let second = draw(magnitudes, Some(first), uniform[1] * others[first]);
    let [q, r, s, t]: [f32; 4] = std::array::from_fn(|j| if others[j] > 0.0 { magnitudes[j] / others[j] } else { 0.0 });
    let of_others = [r + s + t, q + s + t, q + r + t, q + r + s];
    let value = |k: usize| signed(8.0 * (sum / (1.0 + of_others[k])), four[k], magnitudes[k]);
    (1 << first | 1 << second, std::array::from_fn(value))
}

/// The sum, and those of all but each. Sums, not differences: nothing cancels.
fn sums([a, b, c, d]: [f32; 4]) -> (f32, [f32; 4]) {
    let (ab, cd) = (a + b, c + d);
    (ab + cd, [b + cd, a + cd, ab + d, ab + c])
}

/// A magnitude with an element's sign; nothing where the element is too small to have been drawn but in place of one
/// that is not there.
fn signed(value: f32, element: f32, magnitude: f32) -> f32 {
    if magnitude > 0.0 { value.copysign(element) } else { 0.0 }
}

/// The first element that `target` falls to, where each takes as much as its magnitude; but for one. Where rounding
/// left nobody: the last that has any, or the lowest there is.
fn draw(magnitudes: [f32; 4], without: Option<usize>, target: f32) -> usize {
    let (mut end, mut last) = (0.0, None);
    for i in (0..4).filter(|i| Some(*i) != without) {
        end += magnitudes[i];
        if target < end {
            return i;
        }
        if magnitudes[i] > 0.0 {
            last = Some(i);
        }
    }
    last.unwrap_or(if without == Some(0) { 1 } else { 0 })
}

/// Returns which two elements are kept, and their values, for a uniform number `u`: systematic sampling. The magnitudes
/// lie side by side on a line, each clipped to the sum of the others. The elements under `u` and under `u` plus half
/// the length are kept, each worth half the length. A clipped element covers half the line: it is always kept, with its
/// own magnitude.
pub(super) fn exact(four: [f32; 4], uniform: f32) -> (u8, [f32; 4]) {
    let magnitudes = four.map(|v| v.abs() * 0.125);
    let (_, others) = sums(magnitudes);
    let line: [f32; 4] = std::array::from_fn(|i| magnitudes[i].min(others[i]));
    let half = 0.5 * (line[0] + line[1] + line[2] + line[3]);
    let point = uniform * half;
    // One element, or none, is all there is: no line.
    let kept = if half > 0.0 { 1 << place(line, point) | 1 << place(line, point + half) } else { two_largest(four) };
    let value = |i: usize| signed((8.0 * half).max(four[i].abs()), four[i], magnitudes[i]);
    (kept, std::array::from_fn(value))
}

/// The element that a point of the line falls to.
fn place([a, b, c, _]: [f32; 4], point: f32) -> usize {
    let ends = [a, a + b, a + b + c];
    ends.iter().filter(|end| **end <= point).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;
    use proptest::prelude::*;

    type Group = [f32; 4];

    /// How often each is kept and what it stands for, over an even grid of random numbers.
    fn over_a_grid(
        four: Group,
        estimate: impl Fn(Group, [f32; 2]) -> (u8, Group),
        n: usize,
        m: usize,
    ) -> ([f64; 4], [f64; 4]) {
        let (mut kept, mut mean) = ([0.0; 4], [0.0; 4]);
        for i in 0..n {
            for j in 0..m {
                let u = [(i as f32 + 0.5) / n as f32, (j as f32 + 0.5) / m as f32];
                let (bits, values) = estimate(four, u);
                assert!((1..=2).contains(&bits.count_ones()));
                for k in (0..4).filter(|k| bits >> k & 1 == 1) {
                    kept[k] += 1.0 / (n * m) as f64;
                    mean[k] += f64::from(values[k]) / (n * m) as f64;
                }
            }
        }
        (kept, mean)
    }

    fn groups() -> impl Strategy<Value = Group> {
        let number = prop_oneof![4 => -3f32..3.0, 1 => Just(0.0), 1 => Just(1.0), 1 => -100f32..100.0];
        [number.clone(), number.clone(), number.clone(), number]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// On a grid every region of the random numbers counts by its area, to one part in its side.
        #[test]
        fn the_mean_is_the_group(four in groups()) {
            let size: f32 = four.iter().map(|v| v.abs()).sum();
            let (_, mean) = over_a_grid(four, approximate, 300, 300);
            let (kept, best) = over_a_grid(four, |x, u| exact(x, u[0]), 20_000, 1);
            for k in 0..4 {
                let x = f64::from(four[k]);
                prop_assert!((mean[k] - x).abs() <= 0.03 * f64::from(size), "approximate {:?} of {:?}", mean, four);
                prop_assert!((best[k] - x).abs() <= 0.002 * f64::from(size), "exact {:?} of {:?}", best, four);
                let others = f64::from(size) - x.abs();
                let largest = four.iter().fold(0.0, |m: f64, v| m.max(f64::from(v.abs())));
                if x != 0.0 && largest < f64::from(size) - largest {
                    prop_assert!((kept[k] - 2.0 * x.abs() / f64::from(size)).abs() < 1e-3, "{:?} of {:?}", kept, four);
                } else if x.abs() > others {
                    prop_assert!(kept[k] > 0.9999, "{:?} of {:?}", kept, four);
                }
            }
        }
    }

    /// The peers' simulation over Gaussian groups: 1.061.
    #[test]
    fn the_approximation_costs_six_per_cent_of_variance() {
        let (mut of_approximate, mut of_exact) = (0f64, 0f64);
        for group in 0..100_000 {
            // A Gaussian from two uniform numbers (Box and Muller, 1958).
            let gaussian = |i: u32| {
                let [u, v] = random::two(11, group, i);
                (-2.0 * (1.0 - u).ln()).sqrt() * (std::f32::consts::TAU * v).cos()
            };
            let four: Group = std::array::from_fn(|i| gaussian(i as u32));
            let u = random::two(5, group, 0);
            // Of all values, kept or not: x²/p, the second moment.
            let second_moment = |values: Group| -> f64 {
                values.iter().zip(four).map(|(value, x)| f64::from(*value) * f64::from(x)).sum()
            };
            let square: f64 = four.iter().map(|x| f64::from(*x).powi(2)).sum();
            of_approximate += second_moment(approximate(four, u).1) - square;
            of_exact += second_moment(exact(four, u[0]).1) - square;
        }
        let ratio = of_approximate / of_exact;
        assert!((ratio - 1.061).abs() < 0.005, "{ratio}");
    }

    #[test]
    fn groups_with_little_in_them() {
        for u in [0.0, 0.3, 0.999_999_94] {
            assert_eq!(approximate([0.0; 4], [u, u]).1, [0.0; 4]);
            assert_eq!(exact([0.0; 4], u).1, [0.0; 4]);
            for (estimate, name) in [
                (approximate([0.0, 0.0, -2.0, 0.0], [u, u]), "approximate"),
                (exact([0.0, 0.0, -2.0, 0.0], u), "exact"),
            ] {
                assert!(estimate.0 & 0b0100 != 0, "{name}");
                assert_eq!(estimate.1[2], -2.0, "{name}");
            }
            // Two that are there are kept as they are.
            let (bits, values) = approximate([0.0, 3.0, 0.0, 3.0], [u, u]);
            assert_eq!((bits, values[1], values[3]), (0b1010, 3.0, 3.0));
            let (bits, values) = exact([0.0, 3.0, 0.0, 3.0], u);
            assert_eq!((bits, values[1], values[3]), (0b1010, 3.0, 3.0));
        }
    }
}
