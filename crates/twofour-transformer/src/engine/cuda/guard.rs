//! Flags in device memory by which a step's update is applied or skipped: a loss that is not finite, the gradients'
//! norm.

use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, DeviceSlice, LayerContext, flip_counts};

use super::{CudaBuffer, CudaSparseLinear};
use crate::{
    Error, Result, cuda as kernels,
    cuda::{ClippedGradients, GradientClip},
    engine::{StepFindings, StepLimits},
};

/// Elements before the layers' flips: loss, norm, factor and flag.
const NUMBERS: usize = 4;

/// Loss, norm, the factor of gradients, the flag of a step that is skipped, and the flips of layers: one piece of
/// memory, which is read at once.
#[derive(Debug)]
pub struct CudaStepGuard {
    memory: DeviceBuffer,
    layers: usize,
}

impl CudaStepGuard {
    pub(super) fn new(context: &LayerContext, layers: usize) -> Result<Self> {
        Ok(CudaStepGuard { memory: DeviceBuffer::zeros(context, DataType::I32, NUMBERS + 2 * layers)?, layers })
    }

    /// An f32 that gradients are multiplied by.
    pub(super) fn factor(&self) -> Result<DeviceSlice<'_>> {
        Ok(self.memory.as_slice().part(2..3)?.as_type(DataType::F32)?)
    }

    /// A u32 that is not 0 where the step is skipped.
    pub(super) fn skip(&self) -> Result<DeviceSlice<'_>> {
        Ok(self.memory.as_slice().part(3..4)?)
    }

    pub(super) fn judge(
        &mut self,
        context: &LayerContext,
        gradients: &[&CudaBuffer],
        loss: &CudaBuffer,
        limits: StepLimits,
    ) -> Result<()> {
        let StepLimits { clip_norm, loss_scale } = limits;
        let (loss_there, rest) = self.memory.as_slice_mut().split_at(1)?;
        let (norm, rest) = rest.split_at(1)?;
        let (scale, rest) = rest.split_at(1)?;
        let (non_finite, _) = rest.split_at(1)?;
        kernels::copy(context, loss.slice(), loss_there.as_type(DataType::F32)?)?;
        let slices: Vec<_> = gradients.iter().map(|gradient| gradient.slice()).collect();
        let clip = GradientClip {
            largest: if clip_norm > 0.0 { clip_norm as f32 } else { f32::INFINITY },
            host_scale: loss_scale,
            loss_scale: None,
            loss: Some(loss.slice()),
        };
        let (norm, scale) = (norm.as_type(DataType::F32)?, scale.as_type(DataType::F32)?);
        Ok(kernels::clip_gradients(context, &slices, clip, ClippedGradients { norm, scale, non_finite })?)
    }

    /// Reads everything at once.
    pub(super) fn findings(&mut self, context: &LayerContext, layers: &[&CudaSparseLinear]) -> Result<StepFindings> {
        if layers.len() > self.layers {
            return Err(Error::Length {
                what: "layers whose flips are read",
                expected: self.layers,
                found: layers.len(),
            });
        }
        let sparse: Vec<_> = layers.iter().map(|layer| layer.layer()).collect();
        let (_, flips) = self.memory.as_slice_mut().split_at(NUMBERS)?;
        let (flips, _) = flips.split_at(2 * layers.len())?;
        flip_counts(context, &sparse, flips)?;
        let found = self.memory.ids_to_host()?;
        let number = |at: usize| found.get(at).map_or(f64::NAN, |&bits| f64::from(f32::from_bits(bits)));
        let flips = found.get(NUMBERS..NUMBERS + 2 * layers.len()).unwrap_or_default();
        let flips = flips.chunks_exact(2).map(|half| u64::from(half[0]) | u64::from(half[1]) << 32).collect();
        Ok(StepFindings { loss: number(0), norm: number(1), flips })
    }
}
