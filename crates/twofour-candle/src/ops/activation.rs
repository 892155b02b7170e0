//! Element-wise activations and their derivatives.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use twofour::kernel::Activation;
use twofour_transformer::cpu::activation::{backward_in_place, forward};

use super::rows;

/// The activation of every element of `x`, with a gradient. Computed in f32, returned in the dtype of `x`.
///
/// GELU is the exact one, `x * Φ(x)` with `Φ` the normal distribution function, not the approximation by `tanh`; it is
/// evaluated to 2e-7 absolute. The derivative of ReLU at zero is zero.
///
/// # Errors
/// A dtype that is no float; the driver's.
pub fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::activate(x, activation);
    }
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
