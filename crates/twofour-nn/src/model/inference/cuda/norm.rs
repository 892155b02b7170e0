//! Norms of a model on a GPU.

use twofour_cuda::layer::{DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext};
use twofour_transformer::cuda::{
    NormKind,
    decode::{Normalized, TokenNorm, TokenNormTensors, normalize_tokens},
    fill,
};

use crate::Result;

/// A norm with its parameters, f32: layer normalization where there is a bias.
#[derive(Debug)]
pub(in crate::model) struct CudaNorm {
    pub(in crate::model) gain: DeviceBuffer,
    pub(in crate::model) bias: Option<DeviceBuffer>,
    pub(in crate::model) epsilon: f32,
}

/// The tokens that are normalized.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub(super) tokens: usize,
    /// The last of how many tokens is normalized.
    pub(super) every: usize,
    /// Whether normalized values become the residual stream.
    pub(super) replaces: bool,
}

impl CudaNorm {
    /// Launches the addition of a block's output to the residual stream `x`, and the norm of the sum.
    pub(super) fn launch(
        &self,
        context: &LayerContext,
        Rows { tokens, every, replaces }: Rows,
        (x, delta): (DeviceSliceMut<'_>, Option<DeviceSlice<'_>>),
        to: Normalized<'_>,
    ) -> Result<()> {
        let kind = if self.bias.is_some() { NormKind::Layer } else { NormKind::RootMeanSquare };
        let shape = TokenNorm { kind, tokens, width: self.gain.len(), epsilon: self.epsilon, every, replaces };
        let bias = self.bias.as_ref().map(DeviceBuffer::as_slice);
        Ok(normalize_tokens(context, shape, TokenNormTensors { x, delta, gain: self.gain.as_slice(), bias, to })?)
    }

    /// Launches the norm of `x` to `y`. `sums` is overwritten: the kernel normalizes a residual stream in f32, here
    /// zeros, to which `x` is added.
    pub(in crate::model) fn apart(
        &self,
        context: &LayerContext,
        tokens: usize,
        (mut sums, x): (DeviceSliceMut<'_>, DeviceSlice<'_>),
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        fill(context, 0.0, sums.reborrow())?;
        let rows = Rows { tokens, every: 1, replaces: false };
        self.launch(context, rows, (sums, Some(x)), Normalized::Floats(y))
    }
}
