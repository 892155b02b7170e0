//! Gradient descent of the CUDA engine.

use twofour_cuda::layer::{DeviceBuffer, LayerContext};

use super::{CudaBuffer, CudaSparseLinear, CudaStepGuard};
use crate::{
    Result, cuda as kernels,
    cuda::{SgdSettings, SgdTensors},
    engine::{Buffer as _, PrunedDecay, SgdState, SgdStep, operands::expect_unscaled},
};

/// A step of one parameter.
pub(super) fn step(
    context: &LayerContext,
    scale: &mut Option<(f32, DeviceBuffer)>,
    step: &SgdStep,
    state: SgdState<'_, CudaBuffer, CudaSparseLinear>,
    guard: Option<&CudaStepGuard>,
) -> Result<()> {
    let SgdState { master, gradient, momentum, copy, sparse } = state;
    let pruned_decay = match step.pruned_decay {
        PrunedDecay::None => None,
        PrunedDecay::Gradient { strength } => Some(kernels::PrunedDecay::Gradient { strength }),
        PrunedDecay::Weight { strength } => Some(kernels::PrunedDecay::Weight { strength }),
    };
    let bits = step.gradient_scale.to_bits();
    let factor = match (guard, scale) {
        (Some(guard), _) => {
            expect_unscaled("cuda", step.gradient_scale)?;
            guard.factor()?
        }
        // One factor for all parameters of a step.
        (None, Some((own, buffer))) if own.to_bits() == bits => buffer.as_slice(),
        (None, scale) => {
            let buffer = DeviceBuffer::from_host(context, &[step.gradient_scale])?;
            scale.insert((step.gradient_scale, buffer)).1.as_slice()
        }
    };
    // A mask covers the matrix of its layer; other parameters are one row.
    let shape =
        sparse.map_or((1, master.len()), |sparse| (sparse.layer().out_features(), sparse.layer().in_features()));
    let tensors = SgdTensors {
        weight: master.slice_mut(),
        copy: copy.map(CudaBuffer::slice_mut),
        gradient: gradient.slice(),
        momentum: momentum.slice_mut(),
        gradient_scale: Some(factor),
        skip: guard.map(CudaStepGuard::skip).transpose()?,
    };
    let SgdStep { learning_rate, momentum, weight_decay, .. } = *step;
    let settings = SgdSettings { learning_rate, momentum, weight_decay };
    Ok(kernels::sgd(context, shape, tensors, sparse.map(CudaSparseLinear::layer).zip(pruned_decay), settings)?)
}
