//! What the compiler needs to turn plain loops over `f32` slices into vector code: wide instructions, independent
//! partial sums, and an exponential without a branch or a call.

pub use twofour::widest::{Inlined, widest};

/// Independent partial sums: enough to hide the latency of a vector addition.
const LANES: usize = 32;

/// Sum of `f(a[i])`, in a fixed order that does not depend on the machine.
#[inline(always)]
pub fn sum(a: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let (chunks, tail) = a.as_chunks::<LANES>();
    let mut lanes = [0f32; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] += f(chunk[l]);
        }
    }
    let mut total: f32 = lanes.iter().sum();
    for &v in tail {
        total += f(v);
    }
    total
}

/// Sum of `f(a[i], b[i])` over two slices of one length.
#[inline(always)]
pub fn sum2(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    let mut lanes = [0f32; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for l in 0..LANES {
            lanes[l] += f(a[l], b[l]);
        }
    }
    let mut total: f32 = lanes.iter().sum();
    for (&a, &b) in a_tail.iter().zip(b_tail) {
        total += f(a, b);
    }
    total
}

/// The largest element; `-inf` for an empty slice, NaN if there is one.
#[inline(always)]
pub fn max(a: &[f32]) -> f32 {
    #[inline(always)]
    fn larger(a: f32, b: f32) -> f32 {
        // A NaN on either side wins: `f32::max` would drop it.
        if a > b || a.is_nan() { a } else { b }
    }
    let (chunks, tail) = a.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = larger(lanes[l], chunk[l]);
        }
    }
    lanes.iter().chain(tail).fold(f32::NEG_INFINITY, |m, &v| larger(m, v))
}

/// `e^x` within 2 units in the last place on [-87, 88]; 0 below, saturated above, NaN for NaN.
///
/// Range reduction by `n = round(x / ln 2)` and the polynomial of Cephes' `expf` (S. Moshier, netlib).
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x < -87.0 { -87.0 } else { x };
    let clamped = if clamped > 88.3 { 88.3 } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_4;
    let r = r + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let y = p * (r * r) + r + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.0 { 0.0 } else { y * power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0f64;
        for i in 0..350_000 {
            let x = -87.0 + i as f32 * 0.0005;
            let expected = f64::from(x).exp();
            let nearest = expected as f32;
            let unit = f64::from(nearest.next_up()) - f64::from(nearest);
            worst = worst.max((f64::from(exp(x)) - expected).abs() / unit);
        }
        assert!(worst <= 2.0, "{worst} units");
    }

    #[test]
    fn exp_of_the_extremes() {
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::INFINITY).is_finite() && exp(f32::INFINITY) > 1e38);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn reductions_agree_with_plain_ones_at_every_length() {
        for len in 0..131usize {
            let a: Vec<f32> = (0..len).map(|i| ((i * 37) % 23) as f32 - 11.0).collect();
            let b: Vec<f32> = (0..len).map(|i| ((i * 17) % 19) as f32 - 9.0).collect();
            // Small integers: every order of addition is exact.
            assert_eq!(sum(&a, |v| v * v), a.iter().map(|v| v * v).sum::<f32>());
            assert_eq!(sum2(&a, &b, |a, b| a * b), a.iter().zip(&b).map(|(a, b)| a * b).sum::<f32>());
            assert_eq!(max(&a), a.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
        for place in [0, 31, 32, 70] {
            let mut a = vec![1f32; 71];
            a[place] = f32::NAN;
            assert!(max(&a).is_nan(), "NaN at {place}");
        }
    }
}
