//! Layer and RMS normalization.

use std::sync::OnceLock;

use candle_core::{CudaStorage, DType, Shape, Tensor};
use twofour_cuda::layer::Accumulate;
use twofour_transformer::cuda::{Norm, NormBackward, NormForward, NormInput, NormKind, norm_backward, norm_forward};

use super::{
    context,
    memory::{Locked, Output, matrix, read},
};
use crate::{
    Result,
    tape::{Arguments, CudaArgument, Gradients, TapeOperator, record},
};

/// [`crate::ops::layer_norm()`] for a CUDA tensor; shapes have been checked.
pub(crate) fn layer_norm(x: &Tensor, gain: &Tensor, bias: &Tensor, eps: f32) -> candle_core::Result<Tensor> {
    let (x, gain, bias) = (x.contiguous()?, wide(gain)?, wide(bias)?);
    let arguments = Arguments { x: &x, weight: &gain, bias: Some(&bias) };
    Ok(record(Normalization::new(NormKind::Layer, eps), arguments)?)
}

/// [`crate::ops::rms_norm()`] for a CUDA tensor; shapes have been checked.
pub(crate) fn rms_norm(x: &Tensor, gain: &Tensor, eps: f32) -> candle_core::Result<Tensor> {
    let (x, gain) = (x.contiguous()?, wide(gain)?);
    Ok(record(Normalization::new(NormKind::RootMeanSquare, eps), Arguments { x: &x, weight: &gain, bias: None })?)
}

/// Gain and bias in f32: their gradients are sums in f32. Recorded on the tape.
fn wide(parameter: &Tensor) -> candle_core::Result<Tensor> {
    parameter.to_dtype(DType::F32)?.contiguous()
}

struct Normalization {
    kind: NormKind,
    epsilon: f32,
    /// The statistics of the rows, which the forward pass leaves to the backward pass.
    statistics: OnceLock<Statistics>,
}

struct Statistics {
    /// Means, f32 `[rows]`; of layer normalization only.
    mean: Option<Tensor>,
    /// Reciprocal deviations, f32 `[rows]`.
    rstd: Tensor,
}

impl Normalization {
    fn new(kind: NormKind, epsilon: f32) -> Self {
        Normalization { kind, epsilon, statistics: OnceLock::new() }
    }

    fn of(&self, shape: &Shape) -> Norm {
        let (rows, width) = matrix(shape);
        Norm { kind: self.kind, rows, width, epsilon: self.epsilon }
    }
}

impl TapeOperator for Normalization {
    const NAME: &'static str = "norm";

    fn on_cuda(&self, arguments: Arguments<CudaArgument<'_>>) -> Result<(CudaStorage, Shape)> {
        let Arguments { x, weight: gain, bias } = arguments;
        let (device, shape) = (&x.0.device, x.1.shape());
        let (context, norm) = (context::of(device)?, self.of(shape));
        let per_row = || Output::new(device, norm.rows, DType::F32);
        let mut mean = if self.kind == NormKind::Layer { Some(per_row()?) } else { None };
        let mut rstd = per_row()?;
        let mut y = Output::new(device, shape, candle_core::backend::BackendStorage::dtype(x.0))?;
        {
            let x = read("the input of a norm", &context, x.0, x.1)?;
            let gain = read("the gain of a norm", &context, gain.0, gain.1)?;
            let bias = bias.map(|bias| read("the bias of a norm", &context, bias.0, bias.1)).transpose()?;
            let (mut y, mut rstd) = (y.write(&context)?, rstd.write(&context)?);
            let mut mean = mean.as_mut().map(|mean| mean.write(&context)).transpose()?;
            let tensors = NormForward {
                x: NormInput::Tensor(x.slice()),
                gain: gain.slice(),
                bias: bias.as_ref().map(|bias| bias.slice()),
                y: y.slice(),
                mean: mean.as_mut().map(|mean| mean.slice()),
                rstd: rstd.slice(),
            };
            norm_forward(&context, norm, tensors)?;
        }
        let statistics = Statistics { mean: mean.map(Output::into_tensor), rstd: rstd.into_tensor() };
        // Candle runs an operator's forward pass once.
        let _ = self.statistics.set(statistics);
        Ok(y.into_parts())
    }

    fn gradients(&self, Arguments { x, weight: gain, .. }: Arguments<&Tensor>, dy: &Tensor) -> Result<Gradients> {
        let device = context::device_of("the input of a norm", x.device())?;
        let (context, norm) = (context::of(device)?, self.of(x.shape()));
        let Some(Statistics { mean, rstd }) = self.statistics.get() else {
            return Err(candle_core::Error::Msg("norm: a backward pass without a forward pass".into()).into());
        };
        let dy = dy.contiguous()?;
        let mut dx = Output::new(device, x.shape(), x.dtype())?;
        let per_column = || Output::new(device, norm.width, DType::F32);
        let mut dgain = per_column()?;
        let mut dbias = if self.kind == NormKind::Layer { Some(per_column()?) } else { None };
        {
            let (x, gain) = (Locked::new("the input of a norm", x), Locked::new("the gain of a norm", gain));
            let (dy, rstd) = (Locked::new("the gradient of a norm", &dy), Locked::new("a norm's statistics", rstd));
            let mean = mean.as_ref().map(|mean| Locked::new("a norm's statistics", mean));
            let (x, gain, dy) = (x.read(&context)?, gain.read(&context)?, dy.read(&context)?);
            let (rstd, mean) = (rstd.read(&context)?, mean.as_ref().map(|mean| mean.read(&context)).transpose()?);
            let (mut dx, mut dgain) = (dx.write(&context)?, dgain.write(&context)?);
            let mut dbias = dbias.as_mut().map(|dbias| dbias.write(&context)).transpose()?;
            let tensors = NormBackward {
                x: x.slice(),
                gain: gain.slice(),
                mean: mean.as_ref().map(|mean| mean.slice()),
                rstd: rstd.slice(),
                dy: dy.slice(),
                dx: dx.slice(),
                accumulate_dx: Accumulate::Overwrite,
                dgain: dgain.slice(),
                dbias: dbias.as_mut().map(|dbias| dbias.slice()),
                accumulate: Accumulate::Overwrite,
            };
            norm_backward(&context, norm, tensors)?;
        }
        Ok([Some(dx.into_tensor()), Some(dgain.into_tensor()), dbias.map(Output::into_tensor)])
    }
}
