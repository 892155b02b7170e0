//! The gated GELU (GEGLU: Shazeer, "GLU Variants Improve Transformer", 2020) and its gradient.

use super::activation::{elements, expect_length};
use crate::{Arithmetic, Error, Result, kernel::share, widest::widest};

/// Elements that one task computes.
const TASK: usize = 1 << 13;

/// `y = x ⊙ gelu(g)` for `[rows, 2 * features]` inputs, whose rows hold `x` and then `g`. The GELU is the tanh
/// approximation, `gelu(g) = g/2 · (1 + tanh(√(2/π) (g + 0.044715 g³)))`. Computed in f32 and rounded once. At minus
/// infinity the GELU is -0.0.
///
/// # Errors
/// [`Error::GatedInput`] where the input is not made of rows of `2 * features`, [`Error::Length`] for a `y` that is not
/// `[rows, features]`.
///
/// ```
/// use twofour::layer::gated_gelu;
/// let mut y = [0f32; 1];
/// gated_gelu(&[2.0, 1.0], 1, &mut y)?;
/// assert!((y[0] - 1.682_384).abs() < 1e-6);
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn gated_gelu<T: Arithmetic>(input: &[T], features: usize, y: &mut [T]) -> Result<()> {
    let rows = rows(input.len(), features)?;
    expect_length("the gated GELU", elements(rows, features)?, y.len())?;
    if y.is_empty() {
        return Ok(());
    }
    if features > TASK {
        for (y, input) in y.chunks_mut(features).zip(input.chunks(2 * features)) {
            let (x, g) = input.split_at(features);
            let parts = y.chunks_mut(TASK).zip(x.chunks(TASK)).zip(g.chunks(TASK));
            share(parts, || (), |(), ((y, x), g)| values(y, x, g));
        }
        return Ok(());
    }
    let rows = TASK / features;
    let parts = y.chunks_mut(rows * features).zip(input.chunks(2 * rows * features));
    share(
        parts,
        || (),
        |(), (y, input)| {
            for (y, input) in y.chunks_mut(features).zip(input.chunks(2 * features)) {
                let (x, g) = input.split_at(features);
                values(y, x, g);
            }
        },
    );
    Ok(())
}

fn values<T: Arithmetic>(y: &mut [T], x: &[T], g: &[T]) {
    widest(
        #[inline(always)]
        || {
            for ((y, x), g) in y.iter_mut().zip(x).zip(g) {
                *y = T::from_f32(x.to_f32() * gelu(g.to_f32()).0);
            }
        },
    );
}

/// The gradient of [`gated_gelu`]'s input: `dx = dy ⊙ gelu(g)` and `dg = dy ⊙ x ⊙ gelu'(g)`, as `[rows, 2 * features]`.
///
/// # Errors
/// Those of [`gated_gelu`]; [`Error::Length`] for a `gradient` of another length than the input's.
pub fn gated_gelu_gradient<T: Arithmetic>(input: &[T], dy: &[T], features: usize, gradient: &mut [T]) -> Result<()> {
    let rows = rows(input.len(), features)?;
    expect_length("the output gradient", elements(rows, features)?, dy.len())?;
    expect_length("the input gradient", input.len(), gradient.len())?;
    if dy.is_empty() {
        return Ok(());
    }
    if features > TASK {
        let rows = gradient.chunks_mut(2 * features).zip(input.chunks(2 * features)).zip(dy.chunks(features));
        for ((gradient, input), dy) in rows {
            let ((dx, dg), (x, g)) = (gradient.split_at_mut(features), input.split_at(features));
            let inputs = x.chunks(TASK).zip(g.chunks(TASK)).zip(dy.chunks(TASK));
            let parts = dx.chunks_mut(TASK).zip(dg.chunks_mut(TASK)).zip(inputs);
            share(parts, || (), |(), ((dx, dg), ((x, g), dy))| gradients(dx, dg, x, g, dy));
        }
        return Ok(());
    }
    let rows = TASK / features;
    let inputs = input.chunks(2 * rows * features).zip(dy.chunks(rows * features));
    share(
        gradient.chunks_mut(2 * rows * features).zip(inputs),
        || (),
        |(), (gradient, (input, dy))| {
            let rows = gradient.chunks_mut(2 * features).zip(input.chunks(2 * features)).zip(dy.chunks(features));
            for ((gradient, input), dy) in rows {
                let ((dx, dg), (x, g)) = (gradient.split_at_mut(features), input.split_at(features));
                gradients(dx, dg, x, g, dy);
            }
        },
    );
    Ok(())
}

fn gradients<T: Arithmetic>(dx: &mut [T], dg: &mut [T], x: &[T], g: &[T], dy: &[T]) {
    widest(
        #[inline(always)]
        || {
            for ((dx, dg), ((x, g), dy)) in dx.iter_mut().zip(dg).zip(x.iter().zip(g).zip(dy)) {
                let (value, slope) = gelu(g.to_f32());
                let dy = dy.to_f32();
                *dx = T::from_f32(dy * value);
                *dg = T::from_f32(dy * x.to_f32() * slope);
            }
        },
    );
}

fn rows(input: usize, features: usize) -> Result<usize> {
    match features {
        0 if input == 0 => Ok(0),
        _ if features.checked_mul(2).is_some_and(|width| width != 0 && input.is_multiple_of(width)) => {
            Ok(input / (2 * features))
        }
        _ => Err(Error::GatedInput { elements: input, features }),
    }
}

/// The tanh approximation of GELU and its slope: with `u = √(2/π) (g + 0.044715 g³)` and the logistic function σ, `(1 +
/// tanh u) / 2 = σ(2u)`, which keeps the relative precision of small values.
#[inline(always)]
fn gelu(g: f32) -> (f32, f32) {
    // 2 √(2/π)
    const TWICE: f32 = 1.595_769_2;
    const CUBE: f32 = 0.044_715;
    // Beyond ±20 the logistic function is 0 or 1, and squares of infinities would be NaN. A NaN stays one.
    let near = if g > 20.0 { 20.0 } else { g };
    let near = if near < -20.0 { -20.0 } else { near };
    let square = near * near;
    let power = exp(-TWICE * near.abs() * (1.0 + CUBE * square));
    let larger = 1.0 / (1.0 + power);
    let smaller = power * larger;
    // σ(2u) and σ(-2u), which is 1 - σ(2u).
    let sigmoid = if near < 0.0 { smaller } else { larger };
    let opposite = if near < 0.0 { larger } else { smaller };
    let value = if g > 20.0 { g } else { near * sigmoid };
    let slope = sigmoid + near * sigmoid * opposite * TWICE * (1.0 + 3.0 * CUBE * square);
    (value, slope)
}

/// `e^x` to about one unit in the last place, without a branch or a call, so that a loop of it becomes vector
/// instructions. Where the result is subnormal it is 0, and infinity from 88.7 on; NaN stays NaN.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // 1.5 * 2^23: adding it rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with zeros at its end, so that its product with a small whole number is exact.
    const LN_2: [f32; 2] = [355.0 / 512.0, -2.121_944_4e-4];
    let whole = x * std::f32::consts::LOG2_E + ROUND - ROUND;
    let rest = x - whole * LN_2[0] - whole * LN_2[1];
    // Taylor's series: the rest is at most ln 2 / 2, where the next term is 5e-9.
    let series = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let value = series.into_iter().reduce(|sum, factor| sum * rest + factor).unwrap_or(1.0);
    // A half of the exponent at a time, since 2^128 is no f32.
    let half = (whole as i32).clamp(-252, 254) / 2;
    let power = |exponent: i32| f32::from_bits(((exponent + 127) as u32) << 23);
    let scaled = value * power(half) * power((whole as i32).clamp(-252, 254) - half);
    let scaled = if x > 88.8 { f32::INFINITY } else { scaled };
    if x < -87.3 { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    /// The textbook's formulas in f64.
    fn reference(x: f64, g: f64, dy: f64) -> [f64; 3] {
        let (beta, kappa) = ((2.0 / std::f64::consts::PI).sqrt(), 0.044715);
        let t = (beta * (g + kappa * g.powi(3))).tanh();
        let value = 0.5 * g * (1.0 + t);
        let slope = 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * beta * (1.0 + 3.0 * kappa * g * g);
        [x * value, dy * value, dy * x * slope]
    }

    fn check<T: Arithmetic>(rows: usize, features: usize, numbers: &[f32], precision: f64) {
        let of = |values: &[f32]| values.iter().map(|v| T::from_f32(*v)).collect::<Vec<T>>();
        let (input, dy) = (of(&numbers[..2 * rows * features]), of(&numbers[2 * rows * features..]));
        let mut y = vec![T::ZERO; rows * features];
        let mut gradient = vec![T::ZERO; 2 * rows * features];
        gated_gelu(&input, features, &mut y).unwrap();
        gated_gelu_gradient(&input, &dy, features, &mut gradient).unwrap();
        for row in 0..rows {
            for i in 0..features {
                let (at, wide) = (row * features + i, row * 2 * features + i);
                let [x, g, d] = [input[wide], input[wide + features], dy[at]].map(|v| f64::from(v.to_f32()));
                let found = [y[at], gradient[wide], gradient[wide + features]].map(|v| f64::from(v.to_f32()));
                for (found, expected) in found.into_iter().zip(reference(x, g, d)) {
                    // A slope is a sum that crosses zero: its error is that of terms near 1, which x and dy enlarge.
                    let scale = x.abs().max(d.abs()).max((x * d).abs());
                    assert!(
                        (found - expected).abs() <= precision * expected.abs() + 5e-7 * scale + 1e-7,
                        "{x} {g} {d}: {found}, not {expected}"
                    );
                }
            }
        }
    }

    proptest! {
        #[test]
        fn values_and_gradients_are_those_of_the_formulas(
            (rows, features, numbers) in (0usize..5, 1usize..40)
                .prop_flat_map(|(r, f)| (Just(r), Just(f), proptest::collection::vec(-12f32..12.0, 3 * r * f)))
        ) {
            check::<f32>(rows, features, &numbers, 2e-6);
            check::<bf16>(rows, features, &numbers, 5e-3);
            check::<f16>(rows, features, &numbers, 1e-3);
        }
    }

    #[test]
    fn long_rows_and_many_rows_are_cut_into_tasks() {
        for (rows, features) in [(1, 3 * TASK + 5), (2 * TASK, 3)] {
            let numbers: Vec<f32> =
                (0..3 * rows * features).map(|i| ((i * 37 % 1001) as f32 - 500.0) / 100.0).collect();
            check::<f32>(rows, features, &numbers, 2e-6);
        }
    }

    #[test]
    fn the_exponential_is_within_two_units_of_the_last_place() {
        for i in -8700..8870 {
            let x = i as f32 * 0.01 + 0.003;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp(x)) / exact - 1.0).abs() < 2.4e-7, "{x}: {}, not {exact}", exp(x));
        }
        assert_eq!([exp(-200.0), exp(f32::NEG_INFINITY), exp(0.0)], [0.0, 0.0, 1.0]);
        assert_eq!([exp(90.0), exp(1e30), exp(f32::INFINITY)], [f32::INFINITY; 3]);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn infinities_have_their_limits_and_nan_stays() {
        assert_eq!(gelu(f32::INFINITY), (f32::INFINITY, 1.0));
        assert_eq!(gelu(f32::NEG_INFINITY), (0.0, 0.0));
        assert!(gelu(f32::NAN).0.is_nan() && gelu(f32::NAN).1.is_nan());
    }

    #[test]
    fn lengths_are_checked() {
        let mut y = [0f32; 2];
        assert!(matches!(gated_gelu(&[0.0; 6], 2, &mut y), Err(Error::GatedInput { elements: 6, features: 2 })));
        assert!(matches!(gated_gelu(&[0.0; 6], 0, &mut y), Err(Error::GatedInput { .. })));
        assert!(matches!(gated_gelu(&[0.0; 4], usize::MAX, &mut y), Err(Error::GatedInput { .. })));
        assert!(matches!(gated_gelu(&[0.0; 8], 2, &mut y), Err(Error::Length { .. })));
        assert!(gated_gelu::<f32>(&[], 0, &mut []).is_ok());
        assert!(gated_gelu_gradient(&[0.0; 4], &[0.0; 1], 2, &mut [0.0; 4]).is_err());
        assert!(gated_gelu_gradient(&[0.0; 4], &[0.0; 2], 2, &mut [0.0; 3]).is_err());
    }
}
