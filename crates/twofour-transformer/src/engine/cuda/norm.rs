//! Normalization of the CUDA engine.

use twofour::layer::Accumulate;
use twofour_cuda::layer::LayerContext;

use super::{CudaBuffer, rows_of};
use crate::{
    Result, cuda as kernels,
    cuda::{Norm, NormBackward, NormForward, NormInput, NormKind},
    engine::Buffer as _,
};

/// A norm of the rows of a tensor that is as long as `y`.
fn of(kind: NormKind, y: &CudaBuffer, gain: &CudaBuffer, epsilon: f32) -> Norm {
    Norm { kind, rows: rows_of(y, gain.len()), width: gain.len(), epsilon }
}

pub(super) fn layer_forward(
    context: &LayerContext,
    x: NormInput<'_>,
    [gain, bias]: [&CudaBuffer; 2],
    epsilon: f32,
    y: &mut CudaBuffer,
    [mean, rstd]: [&mut CudaBuffer; 2],
) -> Result<()> {
    let norm = of(NormKind::Layer, y, gain, epsilon);
    let tensors = NormForward {
        x,
        gain: gain.slice(),
        bias: Some(bias.slice()),
        y: y.slice_mut(),
        mean: Some(mean.slice_mut()),
        rstd: rstd.slice_mut(),
    };
    Ok(kernels::norm_forward(context, norm, tensors)?)
}

pub(super) fn layer_gradient(
    context: &LayerContext,
    (x, gain, [mean, rstd]): (&CudaBuffer, &CudaBuffer, [&CudaBuffer; 2]),
    (dy, dx): (&CudaBuffer, &mut CudaBuffer),
    accumulate: Accumulate,
    [d_gain, d_bias]: [&mut CudaBuffer; 2],
) -> Result<()> {
    // The backward pass reads the statistics, which hold the ε of the forward pass.
    let norm = of(NormKind::Layer, x, gain, 0.0);
    let tensors = NormBackward {
        x: x.slice(),
        gain: gain.slice(),
        mean: Some(mean.slice()),
        rstd: rstd.slice(),
        dy: dy.slice(),
        dx: dx.slice_mut(),
        accumulate_dx: Accumulate::Add,
        dgain: d_gain.slice_mut(),
        dbias: Some(d_bias.slice_mut()),
        accumulate,
    };
    Ok(kernels::norm_backward(context, norm, tensors)?)
}

pub(super) fn rms_forward(
    context: &LayerContext,
    x: NormInput<'_>,
    gain: &CudaBuffer,
    epsilon: f32,
    y: &mut CudaBuffer,
    rstd: &mut CudaBuffer,
) -> Result<()> {
    let norm = of(NormKind::RootMeanSquare, y, gain, epsilon);
    let tensors =
        NormForward { x, gain: gain.slice(), bias: None, y: y.slice_mut(), mean: None, rstd: rstd.slice_mut() };
    Ok(kernels::norm_forward(context, norm, tensors)?)
}

pub(super) fn rms_gradient(
    context: &LayerContext,
    (x, gain, rstd): (&CudaBuffer, &CudaBuffer, &CudaBuffer),
    epsilon: f32,
    (dy, dx): (&CudaBuffer, &mut CudaBuffer),
    accumulate: Accumulate,
    d_gain: &mut CudaBuffer,
) -> Result<()> {
    let norm = of(NormKind::RootMeanSquare, x, gain, epsilon);
    let tensors = NormBackward {
        x: x.slice(),
        gain: gain.slice(),
        mean: None,
        rstd: rstd.slice(),
        dy: dy.slice(),
        dx: dx.slice_mut(),
        accumulate_dx: Accumulate::Add,
        dgain: d_gain.slice_mut(),
        dbias: None,
        accumulate,
    };
    Ok(kernels::norm_backward(context, norm, tensors)?)
}
