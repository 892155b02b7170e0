//! Layer and RMS normalization.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CudaStorage, CustomOp2, CustomOp3, DType, Layout, Shape, Tensor, bail};
use twofour_cuda::layer::Accumulate;
use twofour_transformer::cuda::{Norm, NormBackward, NormForward, NormInput, NormKind, norm_backward, norm_forward};

use super::{
    context,
    memory::{Locked, Output, matrix, read},
    not_on_the_cpu,
};
use crate::Result;

/// [`crate::ops::layer_norm()`] for a CUDA tensor; shapes have been checked.
pub(crate) fn layer_norm(x: &Tensor, gain: &Tensor, bias: &Tensor, eps: f32) -> candle_core::Result<Tensor> {
    x.contiguous()?.apply_op3(&wide(gain)?, &wide(bias)?, Normalization::new(NormKind::Layer, eps))
}

/// [`crate::ops::rms_norm()`] for a CUDA tensor; shapes have been checked.
pub(crate) fn rms_norm(x: &Tensor, gain: &Tensor, eps: f32) -> candle_core::Result<Tensor> {
    x.contiguous()?.apply_op2(&wide(gain)?, Normalization::new(NormKind::RootMeanSquare, eps))
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

/// An argument of a custom operator.
type Argument<'a> = (&'a CudaStorage, &'a Layout);

impl Normalization {
    fn new(kind: NormKind, epsilon: f32) -> Self {
        Normalization { kind, epsilon, statistics: OnceLock::new() }
    }

    fn of(&self, shape: &Shape) -> Norm {
        let (rows, width) = matrix(shape);
        Norm { kind: self.kind, rows, width, epsilon: self.epsilon }
    }

    fn forward(&self, x: Argument<'_>, gain: Argument<'_>, bias: Option<Argument<'_>>) -> Result<(CudaStorage, Shape)> {
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

    /// The gradients of the input, of the gain, and of the bias of layer normalization.
    fn backward(&self, x: &Tensor, gain: &Tensor, dy: &Tensor) -> Result<(Tensor, Tensor, Option<Tensor>)> {
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
        Ok((dx.into_tensor(), dgain.into_tensor(), dbias.map(Output::into_tensor)))
    }
}

impl CustomOp2 for Normalization {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        not_on_the_cpu("rms_norm")
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        gain: &CudaStorage,
        gain_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok(self.forward((x, x_layout), (gain, gain_layout), None)?)
    }

    fn bwd(
        &self,
        x: &Tensor,
        gain: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let (dx, dgain, _) = self.backward(x, gain, dy)?;
        Ok((Some(dx), Some(dgain)))
    }
}

impl CustomOp3 for Normalization {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        not_on_the_cpu("layer_norm")
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        gain: &CudaStorage,
        gain_layout: &Layout,
        bias: &CudaStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok(self.forward((x, x_layout), (gain, gain_layout), Some((bias, bias_layout)))?)
    }

    fn bwd(
        &self,
        x: &Tensor,
        gain: &Tensor,
        _: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (dx, dgain, dbias) = self.backward(x, gain, dy)?;
        if dbias.is_none() {
            bail!("layer_norm: no gradient of the bias");
        }
        Ok((Some(dx), Some(dgain), dbias))
    }
}
