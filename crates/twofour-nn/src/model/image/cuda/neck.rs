//! SAM's neck on a GPU.

use twofour::{DataType, kernel::KernelElement};
use twofour_cuda::layer::{DenseLinear, DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext};
use twofour_transformer::cuda::neighbours;

use super::super::{
    TransformerConfig,
    neck::{EPSILON, convolution_rows},
};
use crate::{
    Result,
    model::{
        config::NormKind,
        inference::{
            cuda::{Build, CudaNorm, first},
            parts::Parts,
        },
    },
};

/// The neighbours of a place and itself.
const NINE: usize = 9;

/// A convolution of 1x1, a norm over channels, a convolution of 3x3, and a norm.
#[derive(Debug)]
pub(super) struct CudaNeck {
    reduce: DeviceBuffer,
    reduce_norm: CudaNorm,
    /// `[channels, 9 · channels]`.
    convolution: DeviceBuffer,
    norm: CudaNorm,
    channels: usize,
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
    pub(super) fn build<T: KernelElement, P: Parts<T>>(
        build: &Build<'_, T, P>,
        parts: &P,
        (width, channels): (usize, usize),
    ) -> Result<Self> {
        let norm = |name: &str| build.norm_of(name, channels, (NormKind::Layer, EPSILON));
        Ok(CudaNeck {
            reduce: build.matrix(&parts.vector("neck.reduce.weight", channels * width)?)?,
            reduce_norm: norm("neck.reduce_norm")?,
            convolution: build.matrix(&convolution_rows(parts, channels)?)?,
            norm: norm("neck.norm")?,
            channels,
        })
    }

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
        self.reduce_norm.apart(context, tokens, (first(&mut work.sums, len)?, reduced), to)?;
        let (grid, all) = ((images, config.image()?.grid(), channels), NINE * len);
        neighbours(context, grid, work.normalized.as_slice().part(0..len)?, first(&mut work.neighbours, all)?)?;
        let convolution = DenseLinear { out_features: channels, in_features: NINE * channels };
        let input = (work.neighbours.as_slice().part(0..all)?, tokens);
        convolution.forward(context, input, self.convolution.as_slice(), None, first(&mut work.reduced, len)?)?;
        let reduced = work.reduced.as_slice().part(0..len)?;
        self.norm.apart(context, tokens, (first(&mut work.sums, len)?, reduced), y)
    }
}
