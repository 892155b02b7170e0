//! The parameters of a block as its operator sees them, and their gradients.

use candle_core::{Result, Tensor};
use twofour_nn::cpu::vector;

use super::{Gradients, LayerNorm};
use crate::{
    linear::{AnyLinear, LinearOperand},
    ops::{layer_norm, rows},
};

/// Output and input features of a layer.
pub(super) fn dims(linear: &AnyLinear) -> Result<(usize, usize)> {
    match linear {
        AnyLinear::Dense(linear) => linear.weight().dims2(),
        AnyLinear::Sparse(linear) => linear.weight().dims2(),
        AnyLinear::Compressed(linear) => Ok(linear.dims()),
    }
}

/// Normalises `x` with the parameters of `norm`.
pub(super) fn normalise(norm: &LayerNorm, x: &[f32], h: &mut [f32]) -> Result<()> {
    rows::with_slices(norm.gain(), norm.bias(), "layer norm", |gain, bias| {
        layer_norm::forward(x, gain, bias, norm.eps(), h);
        Ok(())
    })
}

/// Adds the gradient through `norm` to `dx` and records those of its parameters.
pub(super) fn normalise_backward(
    norm: &LayerNorm,
    x: &[f32],
    dh: &[f32],
    dx: &mut [f32],
    gradients: &Gradients,
) -> Result<()> {
    let n = norm.gain().elem_count();
    let mut sums = vec![0f32; 2 * n];
    rows::with_slice(norm.gain(), "layer norm", |gain| {
        layer_norm::backward(x, gain, norm.eps(), dh, dx, &mut sums);
        Ok(())
    })?;
    let device = norm.gain().device();
    gradients.add(norm.gain().id(), Tensor::from_slice(&sums[..n], n, device)?)?;
    gradients.add(norm.bias().id(), Tensor::from_slice(&sums[n..], n, device)?)
}

/// Records the gradients of a linear layer's weight and bias, where it has them.
///
/// `x` is `[tokens, in]`, `dy` is `[tokens, out]`.
pub(super) fn record(
    linear: &LinearOperand,
    dy: &[f32],
    x: &[f32],
    tokens: usize,
    gradients: &Gradients,
) -> Result<()> {
    if let Some(weight) = linear.weight() {
        let mut dw = vec![0f32; weight.elem_count()];
        linear.weight_gradient(dy, x, tokens, &mut dw)?;
        gradients.add(weight.id(), Tensor::from_vec(dw, weight.shape(), weight.device())?)?;
    }
    if let Some(bias) = linear.bias() {
        let mut db = vec![0f32; bias.elem_count()];
        linear.bias_gradient(dy, tokens, &mut db)?;
        gradients.add(bias.id(), Tensor::from_vec(db, bias.shape(), bias.device())?)?;
    }
    Ok(())
}

#[inline(always)]
fn add(sums: &mut [f32], row: &[f32]) {
    for (sum, &v) in sums.iter_mut().zip(row) {
        *sum += v;
    }
}

/// `y += x`, in parallel.
pub(super) fn add_residual(x: &[f32], y: &mut [f32]) {
    rows::for_each(y, 1, |first, y| vector::widest(|| add(y, &x[first..])));
}
