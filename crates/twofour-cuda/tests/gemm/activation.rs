//! Activations in f64.

use twofour_cuda::{Activation, DataType};

/// What an activation makes of a number.
pub(crate) fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Identity => x,
        Activation::Relu => x.max(0.0),
        Activation::Gelu => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

/// How far a kernel's epilogue in f32 may be from a result. GELU of 16-bit results is a shorter one: its error is in
/// the part that is subtracted from max(x, 0), at most 0.17.
pub(crate) fn inexact(activation: Activation, result: f64, output: DataType) -> f64 {
    let is_short = activation == Activation::Gelu && output.bytes() == 2;
    4e-7 * (result.abs() + 1.0) + if is_short { 3.5e-5 * result.abs().min(0.17) } else { 0.0 }
}

/// The error function by its series, and by its continued fraction where that is the better one.
fn erf(x: f64) -> f64 {
    if x.abs() < 2.5 {
        let (mut term, mut sum) = (x, x);
        for n in 1..80 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return sum * 2.0 / std::f64::consts::PI.sqrt();
    }
    let z = x.abs();
    let fraction = (1..60).rev().fold(z, |below, n| z + f64::from(n) / 2.0 / below);
    x.signum() * (1.0 - (-z * z).exp() / fraction / std::f64::consts::PI.sqrt())
}

#[test]
fn the_references_error_function() {
    for (x, expected) in [(0.5, 0.5204998778130465), (2.0, 0.9953222650189527), (3.0, 0.9999779095030014)] {
        assert!((erf(x) - expected).abs() < 1e-13 && (erf(-x) + expected).abs() < 1e-13, "{x}");
    }
}
