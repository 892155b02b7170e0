//! Cross-entropy, fused with its softmax.

use candle_core::{CudaStorage, DType, Layout, Shape, Tensor};
use twofour_cuda::layer::{Accumulate, DeviceBuffer, LayerContext};
use twofour_transformer::{cuda as transformer, cuda::LossFactor};

use super::{
    CudaOperator, OnCuda, context,
    memory::{Locked, Output, read},
};
use crate::Result;

/// [`crate::ops::cross_entropy()`] for CUDA logits and targets that have been checked: all are classes, one for each
/// row.
pub(crate) fn cross_entropy(logits: &Tensor, targets: &[u32], classes: usize) -> candle_core::Result<Tensor> {
    let rows = targets.len();
    let targets = Tensor::new(targets, logits.device())?;
    logits.contiguous()?.apply_op1(OnCuda(CrossEntropy { targets, rows, classes }))?.affine(1.0 / rows as f64, 0.0)
}

/// The sum of the losses of all rows, f32.
struct CrossEntropy {
    targets: Tensor,
    rows: usize,
    classes: usize,
}

impl CrossEntropy {
    /// The kernel's report of a target that is no class: there are none.
    fn status(context: &LayerContext) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer::zeros(context, twofour_cuda::DataType::I32, 1)?)
    }
}

impl CudaOperator for CrossEntropy {
    const NAME: &'static str = "cross_entropy";

    fn forward(&self, logits: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let context = context::of(&logits.device)?;
        let mut loss = Output::new(&logits.device, (), DType::F32)?;
        {
            let logits = read("logits", &context, logits, layout)?;
            let targets = Locked::new("targets", &self.targets);
            let (targets, mut status) = (targets.read(&context)?, Self::status(&context)?);
            let (shape, overwrite) = ((self.rows, self.classes), Accumulate::Overwrite);
            let mut loss = loss.write(&context)?;
            let (loss, status) = (loss.slice(), status.as_slice_mut());
            transformer::cross_entropy_loss(&context, shape, logits.slice(), targets.slice(), loss, overwrite, status)?;
        }
        Ok(loss.into_parts())
    }

    fn backward(&self, logits: &Tensor, _: &Tensor, dloss: &Tensor) -> Result<Tensor> {
        let device = context::device_of("logits", logits.device())?;
        let context = context::of(device)?;
        let dloss = dloss.to_dtype(DType::F32)?.contiguous()?;
        let mut gradient = Output::new(device, logits.shape(), logits.dtype())?;
        let mut unused = Output::new(device, (), DType::F32)?;
        {
            let (logits, targets) = (Locked::new("logits", logits), Locked::new("targets", &self.targets));
            let dloss = Locked::new("the gradient of the loss", &dloss);
            let (dloss, targets) = (dloss.read(&context)?, targets.read(&context)?);
            let (mut gradient, mut unused) = (gradient.write(&context)?, unused.write(&context)?);
            let mut status = Self::status(&context)?;
            transformer::copy(&context, logits.read(&context)?.slice(), gradient.slice())?;
            transformer::cross_entropy(
                &context,
                (self.rows, self.classes),
                gradient.slice(),
                targets.slice(),
                LossFactor { host: 1.0, device: Some(dloss.slice()) },
                unused.slice(),
                Accumulate::Overwrite,
                status.as_slice_mut(),
            )?;
        }
        Ok(gradient.into_tensor())
    }
}
