//! Texts in the memory of an NVIDIA GPU.

use std::{borrow::Cow, ops::Range};

use twofour::{
    DataType,
    calibration::{CrossProducts, DenseSide, Statistic, StatisticKind},
};
use twofour_cuda::{
    layer::{DeviceBuffer, DeviceSlice, LayerContext},
    solve::{GpuBackend, InputSums},
};
use twofour_transformer::cuda::copy;

use super::{
    BlockInput, BlockwiseCheckpoint, CheckpointBlock, FreeFeatures, Replace, Stepped,
    inputs::{free_features, inputs},
    runner::{Gathered, Runner, States},
};
use crate::{
    Result,
    model::{
        StoredParts, TransformerConfig,
        inference::{
            cuda::{Build, CudaBlock},
            layer::Role,
        },
    },
};

/// An NVIDIA GPU that runs the blocks of a checkpoint in f32, without TF32, and sums up their inputs.
#[derive(Debug, Clone)]
pub struct GpuRunner {
    backend: GpuBackend,
}

impl GpuRunner {
    /// On the stream of a solver's backend.
    pub fn new(backend: &GpuBackend) -> Self {
        GpuRunner { backend: backend.clone() }
    }
}

impl States for DeviceBuffer {
    type View<'a> = DeviceSlice<'a>;

    fn elements(&self) -> usize {
        self.len()
    }

    fn view(&self) -> DeviceSlice<'_> {
        self.as_slice()
    }

    fn count(view: Self::View<'_>) -> usize {
        view.len()
    }

    fn first(&self, elements: usize) -> Result<Self> {
        Ok(self.copied(0..elements)?)
    }

    fn last(view: Self::View<'_>, elements: usize) -> Result<Self::View<'_>> {
        let range: Range<usize> = view.len().saturating_sub(elements)..view.len();
        if range.len() < elements {
            let (what, found) = ("values of a text", view.len());
            return Err(twofour::Error::Length { what, expected: elements, found }.into());
        }
        Ok(view.part(range)?)
    }
}

impl Runner for GpuRunner {
    type States = DeviceBuffer;
    type Gathered = InputSums;

    fn states(&self, values: Vec<f32>) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer::from_host(self.backend.context(), &values)?)
    }

    fn to_host<'v>(&self, view: <Self::States as States>::View<'v>) -> Result<Cow<'v, [f32]>> {
        let context = self.backend.context();
        let mut values = DeviceBuffer::zeros(context, DataType::F32, view.len())?;
        copy(context, view, values.as_slice_mut())?;
        Ok(Cow::Owned(values.to_host()?))
    }

    fn block<'a>(
        &'a self,
        checkpoint: &'a dyn BlockwiseCheckpoint,
        index: usize,
        replace: Option<Replace<'_>>,
    ) -> Result<Box<dyn CheckpointBlock<DeviceBuffer> + 'a>> {
        checkpoint.gpu_block(self.backend.context(), index, replace)
    }

    fn gather(
        &self,
        kind: StatisticKind,
        features: usize,
        beside: Option<DenseSide>,
    ) -> twofour::Result<Option<InputSums>> {
        if kind == StatisticKind::Nothing {
            return Ok(None);
        }
        Ok(Some(InputSums::new(&self.backend, features, beside)?))
    }
}

impl Gathered<DeviceBuffer> for InputSums {
    fn add(&mut self, x: DeviceSlice<'_>, beside: Option<DeviceSlice<'_>>) -> twofour::Result<()> {
        Ok(InputSums::add(self, x, beside)?)
    }

    /// The Hessian, which includes all other statistics.
    fn finish(self) -> twofour::Result<(Statistic, Option<CrossProducts>)> {
        let (hessian, beside) = InputSums::finish(self)?;
        Ok((Statistic::Hessian(hessian), beside))
    }
}

/// A block on a GPU.
struct GpuBlock {
    block: CudaBlock,
    inputs: Vec<BlockInput>,
    free: Vec<Option<FreeFeatures>>,
}

/// The block of that number, of the weights that `replaced` has, which lie as `stored` says.
pub(super) fn gpu_block(
    (context, config): (&LayerContext, &TransformerConfig),
    index: usize,
    replaced: &StoredParts<'_>,
    stored: &StoredParts<'_>,
) -> Result<Box<dyn CheckpointBlock<DeviceBuffer>>> {
    let block = CudaBlock::new(Build::<f32, _>::new(context.clone(), config, replaced)?, index)?;
    Ok(Box::new(GpuBlock { block, inputs: inputs(index, stored), free: free_features(config, index, stored) }))
}

impl CheckpointBlock<DeviceBuffer> for GpuBlock {
    fn inputs(&self) -> &[BlockInput] {
        &self.inputs
    }

    fn free_features(&self, index: usize) -> Option<&FreeFeatures> {
        self.free.get(index)?.as_ref()
    }

    fn input(&self, index: usize, x: &mut DeviceBuffer, between: Option<DeviceBuffer>) -> Result<DeviceBuffer> {
        self.block.input(Role::ALL[index], x, between)
    }

    fn step(
        &self,
        index: usize,
        input: &DeviceBuffer,
        x: &mut DeviceBuffer,
        shows_products: bool,
    ) -> Result<Stepped<DeviceBuffer>> {
        let (next, products) = self.block.step(Role::ALL[index], input, x, shows_products)?;
        Ok(Stepped { next, products })
    }
}
