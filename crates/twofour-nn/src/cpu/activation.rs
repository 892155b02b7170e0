//! Element-wise activations and their derivatives.

use twofour::kernel::Activation;

use super::{rows, vector};

/// Writes the activation of `x` to `y`.
pub fn forward(activation: Activation, x: &[f32], y: &mut [f32]) {
    match activation {
        Activation::Identity => y.copy_from_slice(x),
        Activation::Relu => map(x, y, |v| if v < 0.0 { 0.0 } else { v }),
        Activation::Gelu => map(x, y, |v| v * normal(v).0),
        Activation::Silu => map(x, y, |v| v * sigmoid(v)),
    }
}

/// Multiplies `dy`, the gradient for the activation of `x`, by its derivative.
pub fn backward_in_place(activation: Activation, x: &[f32], dy: &mut [f32]) {
    match activation {
        Activation::Identity => {}
        Activation::Relu => scale_by(x, dy, |v| if v > 0.0 { 1.0 } else { 0.0 }),
        Activation::Gelu => scale_by(x, dy, |v| {
            let (distribution, density) = normal(v);
            distribution + v * density
        }),
        Activation::Silu => scale_by(x, dy, |v| {
            let s = sigmoid(v);
            s * (1.0 + v * (1.0 - s))
        }),
    }
}

fn map(x: &[f32], y: &mut [f32], f: impl Fn(f32) -> f32 + Sync) {
    rows::for_each(y, 1, |first, y| {
        vector::widest(|| {
            for (y, &x) in y.iter_mut().zip(&x[first..]) {
                *y = f(x);
            }
        });
    });
}

fn scale_by(x: &[f32], dy: &mut [f32], derivative: impl Fn(f32) -> f32 + Sync) {
    rows::for_each(dy, 1, |first, dy| {
        vector::widest(|| {
            for (dy, &x) in dy.iter_mut().zip(&x[first..]) {
                *dy *= derivative(x);
            }
        });
    });
}

#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + vector::exp(-x))
}

/// The normal distribution function and its density.
///
/// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7 for `erf`. Both share one exponential.
#[inline(always)]
pub(super) fn normal(x: f32) -> (f32, f32) {
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
