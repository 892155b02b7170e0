//! Softmax over the last dimension.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use twofour_transformer::cpu::{
    softmax::{backward_in_place, in_place},
    vector,
};

use super::rows;

/// Softmax over the last dimension of `x: [.., n]`, with a gradient. Computed in f32, returned in the dtype of `x`.
///
/// An element of `-inf` gets probability zero; a row of nothing but `-inf` becomes NaN, as in the reference.
///
/// # Errors
/// A scalar.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    rows::last_dim(x, "softmax")?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::softmax(x);
    }
    rows::operand(x)?.apply_op1(Softmax)?.to_dtype(x.dtype())
}

struct Softmax;

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::slice(x, layout, "softmax")?;
        let n = layout.dims().last().copied().unwrap_or(1);
        let mut y = x.to_vec();
        rows::for_each(&mut y, n, |_, y| vector::widest(|| y.chunks_exact_mut(n).for_each(in_place)));
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let n = rows::last_dim(x, "softmax")?;
        let mut dx = rows::with_slice(dy, "softmax backward", |dy| Ok(dy.to_vec()))?;
        rows::with_slice(y, "softmax backward", |y| {
            rows::for_each(&mut dx, n, |first, dx| {
                vector::widest(|| {
                    for (y, dx) in y[first * n..].chunks_exact(n).zip(dx.chunks_exact_mut(n)) {
                        backward_in_place(y, dx);
                    }
                });
            });
            Ok(())
        })?;
        Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{D, Device};

    use super::*;
    use crate::ops::gradient_check::{Case, against_reference, finite_differences};

    #[test]
    fn agrees_with_the_slow_path_in_values_and_gradients() -> Result<()> {
        for shape in [vec![5], vec![3, 1], vec![2, 3, 77], vec![300, 64]] {
            let case = Case::new(&[shape], 21)?;
            against_reference(&case, |v| softmax(&v[0]), |v| candle_nn::ops::softmax(&v[0], D::Minus1), 1e-5)?;
        }
        Ok(())
    }

    #[test]
    fn gradients_agree_with_finite_differences() -> Result<()> {
        finite_differences(&Case::new(&[vec![3, 9]], 22)?, |v| softmax(&v[0]))
    }

    #[test]
    fn masked_and_enormous_elements() -> Result<()> {
        let x = Tensor::new(
            &[[f32::NEG_INFINITY, 1e30, 1e30, -1e30], [3e38, -3e38, 0.0, f32::NEG_INFINITY]],
            &Device::Cpu,
        )?;
        assert_eq!(softmax(&x)?.to_vec2::<f32>()?, vec![vec![0.0, 0.5, 0.5, 0.0], vec![1.0, 0.0, 0.0, 0.0]]);
        let nan = Tensor::new(&[[0f32, f32::NAN, 1.0]], &Device::Cpu)?;
        assert!(softmax(&nan)?.to_vec2::<f32>()?[0].iter().all(|v| v.is_nan()));
        Ok(())
    }
}
