//! Minimum-variance unbiased estimators of a group by two of its elements.
//!
//! An element that is kept with probability `p` is divided by it, so that its mean is the element (Horvitz and Thompson, 1952). Magnitudes are made eight times smaller
//! first, so that no sum overflows; probabilities do not see it.

/// What is kept, and with which values, given two uniform numbers: the first element is drawn in proportion to its magnitude, the second from the others likewise.
pub(super) fn approximate(four: [f32; 4], uniform: [f32; 2]) -> (u8, [f32; 4]) {
    let [a, b, c, d] = four.map(|v| v.abs() * 0.125);
    let magnitudes = [a, b, c, d];
    let sum = a + b + c + d;
    if sum == 0.0 {
        return (0b0011, four);
    }
    // Sums, not differences: nothing cancels.
    let others = [b + c + d, a + c + d, a + b + d, a + b + c];
    let first = draw(magnitudes, None, uniform[0] * sum);
    let second = draw(magnitudes, Some(first), uniform[1] * others[first]);
    let share = magnitudes.map(|m| m / sum);
    let [q, r, s, t]: [f32; 4] = std::array::from_fn(|j| if others[j] > 0.0 { share[j] / others[j] } else { 0.0 });
    let of_others = [r + s + t, q + s + t, q + r + t, q + r + s];
    let values = std::array::from_fn(|k| divided(four[k], share[k] + magnitudes[k] * of_others[k]));
    (1 << first | 1 << second, values)
}

/// The first element that `target` falls to, where each takes as much as its magnitude; but for one. Where rounding left nobody: the last that has any, or the lowest
/// there is.
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

/// Nothing where the probability is too small for f32: such an element is drawn only in place of one that is not there.
fn divided(value: f32, probability: f32) -> f32 {
    if probability > 0.0 { value / probability } else { 0.0 }
}

/// What is kept, and with which values, given a uniform number: pairs are drawn so that each element is kept with probability `min(1, 2 |x| / Σ)`, or, where one is larger than all others
/// together, it always and the others in proportion to their magnitudes.
pub(super) fn exact(four: [f32; 4], uniform: f32) -> (u8, [f32; 4]) {
    let magnitudes = four.map(|v| v.abs() * 0.125);
    // Indices in ascending order of magnitude, equal ones by index.
    let mut order = [0; 4];
    for i in 0..4 {
        let before = |j: &usize| if *j < i { magnitudes[*j] <= magnitudes[i] } else { magnitudes[*j] < magnitudes[i] };
        order[(0..4).filter(|j| *j != i).filter(before).count()] = i;
    }
    let [a, b, c, d] = order.map(|i| magnitudes[i]);
    let smaller = a + b + c;
    let mut values = four;
    // Of the pairs 13, 14, 23, 24, 34 of the sorted magnitudes: twice the sum times their probabilities.
    let weights = if smaller > d {
        let sum = smaller + d;
        for (i, m) in order.into_iter().zip([a, b, c, d]) {
            let probability = 2.0 * m / sum;
            values[i] = divided(four[i], if probability > 1.0 { 1.0 } else { probability });
        }
        let (first, last) = (2.0 * a + c - d, 2.0 * ((c + d) - (a + b)));
        if first > 0.0 {
            [first, 2.0 * a + d - c, 2.0 * b + c - d, 2.0 * b + d - c, last]
        } else {
            [0.0, 4.0 * a, 2.0 * (smaller - d), 2.0 * ((b - a) + (d - c)), last]
        }
    } else {
        for (i, m) in order.into_iter().zip([a, b, c]) {
            values[i] = divided(four[i], m / smaller);
        }
        [0.0, a, 0.0, b, c]
    };
    const PAIRS: [(usize, usize); 5] = [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];
    let total = weights[0] + weights[1] + weights[2] + weights[3] + weights[4];
    let target = uniform * total;
    let mut end = 0.0;
    // The last pair keeps the two largest: it is right wherever rounding left nobody.
    let mut pair = PAIRS[4];
    for (i, weight) in weights.into_iter().enumerate().take(4) {
        end += weight;
        if target < end {
            pair = PAIRS[i];
            break;
        }
    }
    (1 << order[pair.0] | 1 << order[pair.1], values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::random;
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
                assert_eq!(bits.count_ones(), 2);
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
            let gaussian = |i: u64| {
                let [u, v] = random::uniform(11, 4 * group + i);
                (-2.0 * (1.0 - u).ln()).sqrt() * (std::f32::consts::TAU * v).cos()
            };
            let four: Group = std::array::from_fn(|i| gaussian(i as u64));
            let u = random::uniform(5, group);
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
            assert_eq!(approximate([0.0; 4], [u, u]).0, 0b0011);
            assert_eq!(exact([0.0; 4], u).0.count_ones(), 2);
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
