//! Root-mean-square normalisation (Zhang and Sennrich, 2019) over the last dimension.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use twofour_transformer::cpu::rms_norm::{backward, forward};

use super::rows;

/// `x / sqrt(mean(x^2) + eps) * gain` over the last dimension of `x`, with gradients for both.
///
/// `x` is `[.., n]`, `gain` is `[n]`. Computed in f32, returned in the dtype of `x`.
///
/// # Errors
/// Shapes that do not fit, or tensors on different devices.
pub fn rms_norm(x: &Tensor, gain: &Tensor, eps: f32) -> Result<Tensor> {
    let n = rows::last_dim(x, "rms_norm")?;
    if gain.dims() != [n] {
        bail!("rms_norm: the last dimension of x is {n}, but gain has shape {:?}", gain.dims());
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::rms_norm(x, gain, eps);
    }
    rows::operand(x)?.apply_op2(&rows::operand(gain)?, RmsNorm { eps })?.to_dtype(x.dtype())
}

struct RmsNorm {
    eps: f32,
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gain: &CpuStorage,
        gain_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = rows::slice(x, x_layout, "rms_norm")?;
        let gain = rows::slice(gain, gain_layout, "rms_norm gain")?;
        let mut y = vec![0f32; x.len()];
        forward(x, gain, self.eps, &mut y);
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, gain: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let n = gain.elem_count();
        let mut dx = vec![0f32; x.elem_count()];
        let mut dgain = vec![0f32; n];
        rows::with_slices(x, dy, "rms_norm backward", |x, dy| {
            rows::with_slice(gain, "rms_norm backward", |gain| {
                backward(x, gain, self.eps, dy, &mut dx, &mut dgain);
                Ok(())
            })
        })?;
        Ok((Some(Tensor::from_vec(dx, x.shape(), x.device())?), Some(Tensor::from_vec(dgain, n, x.device())?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::gradient_check::{Case, against_reference, finite_differences, random};

    #[test]
    fn agrees_with_the_slow_path_in_values_and_gradients() -> Result<()> {
        for shape in [vec![3, 5, 48], vec![1, 1], vec![7, 33], vec![400, 64]] {
            let n = *shape.last().unwrap_or(&1);
            let case = Case::new(&[shape, vec![n]], 11)?;
            against_reference(
                &case,
                |v| rms_norm(&v[0], &v[1], 1e-5),
                |v| candle_nn::ops::rms_norm_slow(&v[0], &v[1], 1e-5),
                1e-4,
            )?;
        }
        Ok(())
    }

    #[test]
    fn gradients_agree_with_finite_differences() -> Result<()> {
        finite_differences(&Case::new(&[vec![3, 12], vec![12]], 12)?, |v| rms_norm(&v[0], &v[1], 1e-5))
    }

    #[test]
    fn a_row_of_zeros_stays_finite() -> Result<()> {
        let case = Case::zeros(&[vec![2, 40], vec![40]])?;
        against_reference(
            &case,
            |v| rms_norm(&v[0], &v[1], 1e-5),
            |v| candle_nn::ops::rms_norm_slow(&v[0], &v[1], 1e-5),
            1e-6,
        )
    }

    #[test]
    fn wrong_shapes_are_refused() -> Result<()> {
        assert!(rms_norm(&random(&[2, 9], 6)?, &random(&[8], 7)?, 1e-5).is_err());
        Ok(())
    }
}
