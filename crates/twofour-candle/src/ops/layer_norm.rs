//! Layer normalisation (Ba, Kiros and Hinton, 2016) over the last dimension.

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};
use twofour_transformer::cpu::layer_norm as slices;

use super::rows;

/// `(x - mean) / sqrt(var + eps) * gain + bias` over the last dimension of `x`, with gradients for all three.
///
/// `x` is `[.., n]`, `gain` and `bias` are `[n]`; the variance is the biased one. Computed in f32, returned in the
/// dtype of `x`.
///
/// # Errors
/// Shapes that do not fit, or tensors on different devices.
pub fn layer_norm(x: &Tensor, gain: &Tensor, bias: &Tensor, eps: f32) -> Result<Tensor> {
    let n = rows::last_dim(x, "layer_norm")?;
    if gain.dims() != [n] || bias.dims() != [n] {
        bail!(
            "layer_norm: the last dimension of x is {n}, but gain has shape {:?} and bias {:?}",
            gain.dims(),
            bias.dims()
        );
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::layer_norm(x, gain, bias, eps);
    }
    let y = rows::operand(x)?.apply_op3(&rows::operand(gain)?, &rows::operand(bias)?, LayerNorm { eps })?;
    y.to_dtype(x.dtype())
}

struct LayerNorm {
    eps: f32,
}

impl CustomOp3 for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        gain: &CpuStorage,
        gain_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = rows::slice(x, x_layout, "layer_norm")?;
        let gain = rows::slice(gain, gain_layout, "layer_norm gain")?;
        let bias = rows::slice(bias, bias_layout, "layer_norm bias")?;
        let mut y = vec![0f32; x.len()];
        forward(x, gain, bias, self.eps, &mut y);
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        gain: &Tensor,
        _bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let n = gain.elem_count();
        let mut dx = vec![0f32; x.elem_count()];
        let mut dgain_dbias = vec![0f32; 2 * n];
        rows::with_slices(x, dy, "layer_norm backward", |x, dy| {
            rows::with_slice(gain, "layer_norm backward", |gain| {
                backward(x, gain, self.eps, dy, &mut dx, &mut dgain_dbias);
                Ok(())
            })
        })?;
        let device = x.device();
        let (dgain, dbias) = dgain_dbias.split_at(n);
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), device)?),
            Some(Tensor::from_slice(dgain, n, device)?),
            Some(Tensor::from_slice(dbias, n, device)?),
        ))
    }
}

/// Normalises every row of `x: [rows, n]` into `y`; `gain` and `bias` have `n` elements.
pub(crate) fn forward(x: &[f32], gain: &[f32], bias: &[f32], eps: f32, y: &mut [f32]) {
    let [mut mean, mut rstd] = statistics(x, gain.len());
    slices::forward(x, [gain, bias], eps, y, [&mut mean, &mut rstd]);
}

/// Adds the gradients for `x` to `dx`, and those for gain and bias, one after the other, to `dgain_dbias: [2, n]`.
pub(crate) fn backward(x: &[f32], gain: &[f32], eps: f32, dy: &[f32], dx: &mut [f32], dgain_dbias: &mut [f32]) {
    let [mut mean, mut rstd] = statistics(x, gain.len());
    slices::statistics(x, gain.len(), eps, [&mut mean, &mut rstd]);
    slices::backward((x, gain, [&mean, &rstd]), dy, dx, dgain_dbias);
}

/// Room for mean and reciprocal standard deviation of every row.
fn statistics(x: &[f32], n: usize) -> [Vec<f32>; 2] {
    let rows = x.len().checked_div(n).unwrap_or(0);
    [vec![0f32; rows], vec![0f32; rows]]
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Var};

    use super::*;
    use crate::ops::gradient_check::{Case, against_reference, finite_differences, random};

    #[test]
    fn agrees_with_the_slow_path_in_values_and_gradients() -> Result<()> {
        for shape in [vec![3, 5, 48], vec![1, 1], vec![7, 33], vec![2, 4, 6, 40], vec![500, 64]] {
            let n = *shape.last().unwrap_or(&1);
            let case = Case::new(&[shape, vec![n], vec![n]], 1)?;
            against_reference(
                &case,
                |v| layer_norm(&v[0], &v[1], &v[2], 1e-5),
                |v| candle_nn::ops::layer_norm_slow(&v[0], &v[1], &v[2], 1e-5),
                1e-4,
            )?;
        }
        Ok(())
    }

    #[test]
    fn gradients_agree_with_finite_differences() -> Result<()> {
        let case = Case::new(&[vec![2, 20], vec![20], vec![20]], 2)?;
        finite_differences(&case, |v| layer_norm(&v[0], &v[1], &v[2], 1e-5))
    }

    #[test]
    fn half_precision_keeps_its_dtype_and_its_gradient() -> Result<()> {
        for dtype in [DType::BF16, DType::F16] {
            let x = Var::from_tensor(&random(&[4, 32], 3)?.to_dtype(dtype)?)?;
            let gain = Var::from_tensor(&random(&[32], 4)?.to_dtype(dtype)?)?;
            let y = layer_norm(&x, &gain, &gain, 1e-5)?;
            assert_eq!(y.dtype(), dtype);
            let grads = y.sqr()?.sum_all()?.backward()?;
            assert_eq!(grads.get(&x).map(Tensor::dtype), Some(dtype));
            assert_eq!(grads.get(&gain).map(Tensor::dtype), Some(dtype));
        }
        Ok(())
    }

    #[test]
    fn empty_input_and_wrong_shapes() -> Result<()> {
        let gain = random(&[8], 5)?;
        let empty = Tensor::zeros((0, 8), DType::F32, gain.device())?;
        assert_eq!(layer_norm(&empty, &gain, &gain, 1e-5)?.dims(), [0, 8]);
        assert!(layer_norm(&random(&[2, 9], 6)?, &gain, &gain, 1e-5).is_err());
        Ok(())
    }

    #[test]
    fn a_view_is_read_by_its_strides() -> Result<()> {
        let case = Case::new(&[vec![16, 6], vec![16], vec![16]], 7)?;
        against_reference(
            &case,
            |v| layer_norm(&v[0].t()?, &v[1], &v[2], 1e-5),
            |v| candle_nn::ops::layer_norm_slow(&v[0].t()?.contiguous()?, &v[1], &v[2], 1e-5),
            1e-4,
        )
    }
}
