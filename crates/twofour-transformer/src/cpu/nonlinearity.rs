//! The functions of feed-forward blocks, plain and gated, and their gradients.

use twofour::Arithmetic;

use super::{rows, vector};
use crate::operands::Nonlinearity;

/// Twice the root of 2/π, and the cubic coefficient of GELU's approximation.
const TANH_GELU: [f32; 2] = [1.595_769, 0.044_715];

/// A function with its derivative, as loops are compiled for it.
trait Function: Sync {
    fn value(x: f32) -> f32;
    fn slope(x: f32) -> f32;
}

struct Relu;
struct Gelu;
struct TanhGelu;
struct Silu;
struct SquaredRelu;

impl Function for Relu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        // Not f32::max, which would turn NaN into 0.
        if x < 0.0 { 0.0 } else { x }
    }
    #[inline(always)]
    fn slope(x: f32) -> f32 {
        if x > 0.0 { 1.0 } else { 0.0 }
    }
}

impl Function for Gelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * normal(x).0
    }
    #[inline(always)]
    fn slope(x: f32) -> f32 {
        let (distribution, density) = normal(x);
        distribution + x * density
    }
}

impl Function for TanhGelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        let [scale, cubic] = TANH_GELU;
        x * sigmoid(scale * (x + cubic * x * x * x))
    }
    #[inline(always)]
    fn slope(x: f32) -> f32 {
        let [scale, cubic] = TANH_GELU;
        let s = sigmoid(scale * (x + cubic * x * x * x));
        s + x * s * (1.0 - s) * scale * (1.0 + 3.0 * cubic * x * x)
    }
}

impl Function for Silu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        x * sigmoid(x)
    }
    #[inline(always)]
    fn slope(x: f32) -> f32 {
        let s = sigmoid(x);
        s * (1.0 + x * (1.0 - s))
    }
}

impl Function for SquaredRelu {
    #[inline(always)]
    fn value(x: f32) -> f32 {
        let x = Relu::value(x);
        x * x
    }
    #[inline(always)]
    fn slope(x: f32) -> f32 {
        2.0 * Relu::value(x)
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + vector::exp(-x))
}

/// The normal distribution function and its density.
///
/// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7 for `erf`. Both share one
/// exponential.
#[inline(always)]
fn normal(x: f32) -> (f32, f32) {
    let bell = vector::exp(-0.5 * x * x);
    let t = 1.0 / (1.0 + 0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2 * x.abs());
    let p = 1.061_405_4;
    let p = p * t - 1.453_152;
    let p = p * t + 1.421_413_8;
    let p = p * t - 0.284_496_74;
    let p = p * t + 0.254_829_6;
    let tail = 0.5 * p * t * bell;
    (if x < 0.0 { tail } else { 1.0 - tail }, bell * 0.398_942_3)
}

/// Runs `$body` with `$F` as the function's type.
macro_rules! with_function {
    ($function:expr, $F:ident => $body:expr) => {
        match $function {
            Nonlinearity::Relu => {
                type $F = Relu;
                $body
            }
            Nonlinearity::Gelu => {
                type $F = Gelu;
                $body
            }
            Nonlinearity::TanhGelu => {
                type $F = TanhGelu;
                $body
            }
            Nonlinearity::Silu => {
                type $F = Silu;
                $body
            }
            Nonlinearity::SquaredRelu => {
                type $F = SquaredRelu;
                $body
            }
        }
    };
}

/// `y = function(x)`.
pub fn forward(function: Nonlinearity, x: &[f32], y: &mut [f32]) {
    with_function!(function, F => {
        rows::for_each(y, 1, |first, y| {
            vector::widest(|| y.iter_mut().zip(&x[first..]).for_each(|(y, &x)| *y = F::value(x)));
        });
    });
}

/// `y ← function(y)`.
pub fn in_place(function: Nonlinearity, y: &mut [f32]) {
    with_function!(function, F => {
        rows::for_each(y, 1, |_, y| vector::widest(|| y.iter_mut().for_each(|y| *y = F::value(*y))));
    });
}

/// `dy ← dy · function'(x)`.
pub fn gradient_in_place(function: Nonlinearity, x: &[f32], dy: &mut [f32]) {
    with_function!(function, F => {
        rows::for_each(dy, 1, |first, dy| {
            vector::widest(|| dy.iter_mut().zip(&x[first..]).for_each(|(dy, &x)| *dy *= F::slope(x)));
        });
    });
}

/// `y = function(gate) ⊙ up` for `x` of rows that hold `width` elements of the gate, then `width` of `up`.
pub fn gated(function: Nonlinearity, width: usize, x: &[f32], y: &mut [f32]) {
    with_function!(function, F => {
        rows::for_each(y, width, |first, y| {
            vector::widest(|| {
                for (y, x) in y.chunks_exact_mut(width).zip(x[2 * first * width..].chunks_exact(2 * width)) {
                    let (gate, up) = x.split_at(width);
                    y.iter_mut().zip(gate).zip(up).for_each(|((y, &gate), &up)| *y = F::value(gate) * up);
                }
            });
        });
    });
}

/// `y = function(gate) ⊙ up` for one row, computed in f32.
pub fn gated_row<T: Arithmetic>(function: Nonlinearity, (gate, up): (&[T], &[T]), y: &mut [T]) {
    with_function!(function, F => {
        vector::widest(|| {
            for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                *y = T::from_f32(F::value(gate.to_f32()) * up.to_f32());
            }
        });
    });
}

/// The gradient of [`gated`] for `x`, `[rows, 2 width]`, from `dy`, `[rows, width]`.
pub fn gated_gradient(function: Nonlinearity, width: usize, x: &[f32], dy: &[f32], dx: &mut [f32]) {
    with_function!(function, F => {
        rows::for_each(dx, 2 * width, |first, dx| {
            vector::widest(|| {
                let inputs = x[2 * first * width..].chunks_exact(2 * width).zip(dy[first * width..].chunks_exact(width));
                for (dx, (x, dy)) in dx.chunks_exact_mut(2 * width).zip(inputs) {
                    let ((gate, up), (d_gate, d_up)) = (x.split_at(width), dx.split_at_mut(width));
                    let outputs = d_gate.iter_mut().zip(d_up).zip(dy);
                    for (((d_gate, d_up), &dy), (&gate, &up)) in outputs.zip(gate.iter().zip(up)) {
                        *d_gate = dy * up * F::slope(gate);
                        *d_up = dy * F::value(gate);
                    }
                }
            });
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Nonlinearity; 5] =
        [Nonlinearity::Relu, Nonlinearity::Gelu, Nonlinearity::TanhGelu, Nonlinearity::Silu, Nonlinearity::SquaredRelu];

    fn defined(function: Nonlinearity, x: f64) -> f64 {
        match function {
            Nonlinearity::Relu => x.max(0.0),
            // By Simpson's rule over the density.
            Nonlinearity::Gelu => {
                let (steps, density) = (2000, |t: f64| (-t * t / 2.0).exp() / std::f64::consts::TAU.sqrt());
                let h = x / f64::from(steps);
                let weight = |i: i32| if i == 0 || i == steps { 1.0 } else { f64::from(2 + 2 * (i % 2)) };
                let integral: f64 = (0..=steps).map(|i| weight(i) * density(f64::from(i) * h)).sum();
                x * (0.5 + integral * h / 3.0)
            }
            Nonlinearity::TanhGelu => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
            }
            Nonlinearity::Silu => x / (1.0 + (-x).exp()),
            Nonlinearity::SquaredRelu => x.max(0.0).powi(2),
        }
    }

    #[test]
    fn values_and_slopes_agree_with_the_definitions() {
        let x: Vec<f32> = (-50..50).map(|i| i as f32 * 0.09 + 0.011).collect();
        for function in ALL {
            let (mut y, mut dy) = (x.clone(), vec![1f32; x.len()]);
            in_place(function, &mut y);
            gradient_in_place(function, &x, &mut dy);
            for ((&x, y), dy) in x.iter().map(|x| f64::from(*x)).collect::<Vec<_>>().iter().zip(y).zip(dy) {
                let slope = (defined(function, x + 1e-5) - defined(function, x - 1e-5)) / 2e-5;
                assert!((f64::from(y) - defined(function, x)).abs() < 1e-6 * (1.0 + x.abs()), "{function:?} {x}: {y}");
                assert!((f64::from(dy) - slope).abs() < 1e-5, "{function:?} {x}: {dy} {slope}");
            }
        }
    }

    #[test]
    fn gated_values_and_gradients_agree_with_the_plain_function() {
        let (rows, width) = (5, 7);
        let wave = |len: usize, seed: f32| (0..len).map(|i| 2.0 * (i as f32 * 0.7 + seed).sin()).collect::<Vec<f32>>();
        let (x, dy) = (wave(rows * 2 * width, 0.0), wave(rows * width, 1.0));
        for function in ALL {
            let (mut y, mut dx) = (vec![0f32; rows * width], vec![0f32; x.len()]);
            gated(function, width, &x, &mut y);
            gated_gradient(function, width, &x, &dy, &mut dx);
            for row in 0..rows {
                for i in 0..width {
                    let (gate, up) = (row * 2 * width + i, row * 2 * width + width + i);
                    let (mut value, mut slope) = ([x[gate]], [1f32]);
                    in_place(function, &mut value);
                    gradient_in_place(function, &[x[gate]], &mut slope);
                    let dy = dy[row * width + i];
                    assert!((y[row * width + i] - value[0] * x[up]).abs() < 1e-6);
                    assert!((dx[gate] - dy * x[up] * slope[0]).abs() < 1e-6 && (dx[up] - dy * value[0]).abs() < 1e-6);
                }
            }
        }
    }
}
