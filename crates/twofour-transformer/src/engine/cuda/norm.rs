//! Norms of the CUDA engine.

use twofour::layer::Accumulate;
use twofour_cuda::layer::LayerContext;

use super::{CudaBuffer, rows_of};
use crate::{
    Result, cuda as kernels,
    cuda::{Norm, NormBackward, NormForward, NormKind},
    engine::{Buffer as _, NormGradients, NormInput, NormParameters, NormStatistics},
};

/// Returns the norm of the rows of a tensor that is as long as `y`.
fn of(norm: &NormParameters<'_, CudaBuffer>, y: &CudaBuffer) -> Norm {
    let kind = if norm.bias.is_some() { NormKind::Layer } else { NormKind::RootMeanSquare };
    Norm { kind, rows: rows_of(y, norm.gain.len()), width: norm.gain.len(), epsilon: norm.epsilon }
}

pub(super) fn forward(
    context: &LayerContext,
    norm: NormParameters<'_, CudaBuffer>,
    input: NormInput<'_, CudaBuffer>,
    y: &mut CudaBuffer,
    statistics: NormStatistics<&mut CudaBuffer>,
) -> Result<()> {
    let of_rows = of(&norm, y);
    let tensors = NormForward {
        x: match input {
            NormInput::Tensor(x) => kernels::NormInput::Tensor(x.slice()),
            NormInput::Sum(x, sum) => kernels::NormInput::Sum(x.slice(), sum.slice_mut()),
        },
        gain: norm.gain.slice(),
        bias: norm.bias.map(CudaBuffer::slice),
        y: y.slice_mut(),
        mean: statistics.mean.map(CudaBuffer::slice_mut),
        rstd: statistics.rstd.slice_mut(),
    };
    Ok(kernels::norm_forward(context, of_rows, tensors)?)
}

pub(super) fn gradient(
    context: &LayerContext,
    norm: NormParameters<'_, CudaBuffer>,
    (x, statistics): (&CudaBuffer, NormStatistics<&CudaBuffer>),
    (dy, dx): (&CudaBuffer, &mut CudaBuffer),
    accumulate: Accumulate,
    gradients: NormGradients<'_, CudaBuffer>,
) -> Result<()> {
    let tensors = NormBackward {
        x: x.slice(),
        gain: norm.gain.slice(),
        mean: statistics.mean.map(CudaBuffer::slice),
        rstd: statistics.rstd.slice(),
        dy: dy.slice(),
        dx: dx.slice_mut(),
        accumulate_dx: Accumulate::Add,
        dgain: gradients.gain.slice_mut(),
        dbias: gradients.bias.map(CudaBuffer::slice_mut),
        accumulate,
    };
    Ok(kernels::norm_backward(context, of(&norm, x), tensors)?)
}
