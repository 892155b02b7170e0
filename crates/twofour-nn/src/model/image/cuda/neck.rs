//! SAM's neck on a GPU.

use twofour::DataType;
use twofour_cuda::layer::{DenseLinear, DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext};
use twofour_transformer::cuda::{
    NormKind,
    decode::{Normalized, TokenNorm, TokenNormTensors, normalize_tokens},
    fill, neighbours,
};

use super::super::{TransformerConfig, neck::EPSILON};
use crate::{
    Result,
    model::inference::cuda::{CudaNorm, hidden::first},
};

/// The neighbours of a place and itself.
const NINE: usize = 9;

/// A convolution of 1x1, a norm over channels, a convolution of 3x3, and a norm.
#[derive(Debug)]
pub(super) struct CudaNeck {
    pub(super) reduce: DeviceBuffer,
    pub(super) reduce_norm: CudaNorm,
    /// `[channels, 9 · channels]`.
    pub(super) convolution: DeviceBuffer,
    pub(super) norm: CudaNorm,
    pub(super) channels: usize,
}

/// The tensors of the neck for a number of tokens.
#[derive(Debug)]
pub(super) struct NeckWork {
    /// f32, what norms read.
    sums: DeviceBuffer,
    reduced: DeviceBuffer,
    normalized: DeviceBuffer,
    neighbours: DeviceBuffer,
}

impl NeckWork {
    pub(super) fn new(context: &LayerContext, dtype: DataType, (tokens, channels): (usize, usize)) -> Result<Self> {
        let zeros = |width: usize| DeviceBuffer::zeros(context, dtype, tokens * width);
        Ok(NeckWork {
            sums: DeviceBuffer::zeros(context, DataType::F32, tokens * channels)?,
            reduced: zeros(channels)?,
            normalized: zeros(channels)?,
            neighbours: zeros(NINE * channels)?,
        })
    }
}

impl CudaNeck {
    /// Launches the neck for the hidden states `x` `[images · tokens, width]`, in the type to compute in, to `y`
    /// `[images · tokens, channels]`.
    pub(super) fn run(
        &self,
        (context, config): (&LayerContext, &TransformerConfig),
        work: &mut NeckWork,
        images: usize,
        x: DeviceSlice<'_>,
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (channels, tokens) = (self.channels, images * config.image()?.tokens());
        let reduce = DenseLinear { out_features: channels, in_features: config.width };
        let len = tokens * channels;
        reduce.forward(context, (x, tokens), self.reduce.as_slice(), None, first(&mut work.reduced, len)?)?;
        let (reduced, to) = (work.reduced.as_slice().part(0..len)?, first(&mut work.normalized, len)?);
        normalize(context, &self.reduce_norm, (tokens, channels), (first(&mut work.sums, len)?, reduced), to)?;
        let (grid, all) = ((images, config.image()?.grid(), channels), NINE * len);
        neighbours(context, grid, work.normalized.as_slice().part(0..len)?, first(&mut work.neighbours, all)?)?;
        let convolution = DenseLinear { out_features: channels, in_features: NINE * channels };
        let input = (work.neighbours.as_slice().part(0..all)?, tokens);
        convolution.forward(context, input, self.convolution.as_slice(), None, first(&mut work.reduced, len)?)?;
        let reduced = work.reduced.as_slice().part(0..len)?;
        normalize(context, &self.norm, (tokens, channels), (first(&mut work.sums, len)?, reduced), y)
    }
}

/// Launches a norm of `x` to `y`. `sums` is overwritten: the kernel normalizes a residual stream in f32, here zeros, to
/// which `x` is added.
fn normalize(
    context: &LayerContext,
    norm: &CudaNorm,
    (tokens, width): (usize, usize),
    (mut sums, x): (DeviceSliceMut<'_>, DeviceSlice<'_>),
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    fill(context, 0.0, sums.reborrow())?;
    let shape = TokenNorm { kind: NormKind::Layer, tokens, width, epsilon: EPSILON, every: 1 };
    let tensors = TokenNormTensors {
        x: sums,
        delta: Some(x),
        gain: norm.gain.as_slice(),
        bias: norm.bias.as_ref().map(DeviceBuffer::as_slice),
        to: Normalized::Floats(y),
    };
    Ok(normalize_tokens(context, shape, tensors)?)
}
