//! Element-wise activations and their derivatives.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use twofour::kernel::Activation;

use super::{rows, vector};

/// The activation of every element of `x`, with a gradient. Computed in f32, returned in the dtype of `x`.
///
/// GELU is the exact one, `x * Φ(x)` with `Φ` the normal distribution function, not the approximation by `tanh`; it is
/// evaluated to 2e-7 absolute. The derivative of ReLU at zero is zero.
///
/// # Errors
/// A tensor that is not on the CPU.
pub fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    rows::operand(x)?.apply_op1(Activate(activation))?.to_dtype(x.dtype())
}

struct Activate(Activation);

impl CustomOp1 for Activate {
    fn name(&self) -> &'static str {
        "activation"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::slice(x, layout, "activation")?;
        let mut y = vec![0f32; x.len()];
        forward(self.0, x, &mut y);
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let mut dx = rows::with_slice(dy, "activation backward", |dy| Ok(dy.to_vec()))?;
        rows::with_slice(x, "activation backward", |x| {
            backward_in_place(self.0, x, &mut dx);
            Ok(())
        })?;
        Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
    }
}

/// Writes the activation of `x` to `y`.
pub(crate) fn forward(activation: Activation, x: &[f32], y: &mut [f32]) {
    match activation {
        Activation::Identity => y.copy_from_slice(x),
        Activation::Relu => map(x, y, |v| if v < 0.0 { 0.0 } else { v }),
        Activation::Gelu => map(x, y, |v| v * normal(v).0),
        Activation::Silu => map(x, y, |v| v * sigmoid(v)),
    }
}

/// Multiplies `dy`, the gradient for the activation of `x`, by its derivative.
pub(crate) fn backward_in_place(activation: Activation, x: &[f32], dy: &mut [f32]) {
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
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + vector::exp(-x))
}

/// The normal distribution function and its density.
///
/// Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7 for `erf`. Both share one exponential.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::gradient_check::{Case, against_reference, finite_differences};

    type Reference = fn(&Tensor) -> Result<Tensor>;
    const ALL: [(Activation, Reference); 4] = [
        (Activation::Identity, |x| Ok(x.clone())),
        (Activation::Relu, Tensor::relu),
        (Activation::Gelu, Tensor::gelu_erf),
        (Activation::Silu, Tensor::silu),
    ];

    #[test]
    fn agree_with_candles_in_values_and_gradients() -> Result<()> {
        for (activation, reference) in ALL {
            let case = Case::new(&[vec![3, 5000]], 41)?;
            against_reference(&case, |v| activate(&(&v[0] * 6.0)?, activation), |v| reference(&(&v[0] * 6.0)?), 2e-6)?;
        }
        Ok(())
    }

    #[test]
    fn gradients_agree_with_finite_differences() -> Result<()> {
        for activation in [Activation::Identity, Activation::Gelu, Activation::Silu] {
            finite_differences(&Case::new(&[vec![40]], 43)?, |v| activate(&v[0], activation))?;
        }
        Ok(())
    }

    #[test]
    fn extremes_saturate_and_nan_stays() {
        let x = [-1e30, -200.0, 0.0, 200.0, 1e30, f32::NAN];
        for (activation, expected) in
            [(Activation::Gelu, [0.0, 0.0, 0.0, 200.0, 1e30]), (Activation::Silu, [0.0, 0.0, 0.0, 200.0, 1e30])]
        {
            let mut y = [0f32; 6];
            forward(activation, &x, &mut y);
            for (found, expected) in y.iter().zip(expected) {
                assert!((found - expected).abs() <= expected.abs() * 1e-6 + 1e-7, "{activation:?}: {y:?}");
            }
            assert!(y[5].is_nan());
            let mut dy = [1f32; 6];
            backward_in_place(activation, &x, &mut dy);
            assert!(dy[1].abs() < 1e-7 && (dy[3] - 1.0).abs() < 1e-7 && dy[5].is_nan(), "{activation:?}: {dy:?}");
        }
    }
}
