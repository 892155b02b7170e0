//! Root-mean-square normalization of the CUDA engine.

use twofour::layer::Accumulate;
use twofour_cuda::{
    layer::LayerContext,
    transformer::{self, Norm, NormBackward, NormForward, NormKind},
};

use super::{CudaBuffer, rows_of};
use crate::{Result, engine::Buffer as _};

pub(super) fn rms_forward(
    context: &LayerContext,
    (x, gain): (&CudaBuffer, &CudaBuffer),
    epsilon: f32,
    y: &mut CudaBuffer,
    rstd: &mut CudaBuffer,
) -> Result<()> {
    let width = gain.len();
    let norm = Norm { kind: NormKind::RootMeanSquare, rows: rows_of(x, width), width, epsilon };
    let tensors = NormForward {
        x: x.slice(),
        residual: None,
        gain: gain.slice(),
        bias: None,
        y: y.slice_mut(),
        mean: None,
        rstd: rstd.slice_mut(),
    };
    Ok(transformer::norm_forward(context, norm, tensors)?)
}

pub(super) fn rms_gradient(
    context: &LayerContext,
    (x, gain, rstd): (&CudaBuffer, &CudaBuffer, &CudaBuffer),
    epsilon: f32,
    (dy, dx): (&CudaBuffer, &mut CudaBuffer),
    accumulate: Accumulate,
    d_gain: &mut CudaBuffer,
) -> Result<()> {
    let width = gain.len();
    let norm = Norm { kind: NormKind::RootMeanSquare, rows: rows_of(x, width), width, epsilon };
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
    Ok(transformer::norm_backward(context, norm, tensors)?)
}
