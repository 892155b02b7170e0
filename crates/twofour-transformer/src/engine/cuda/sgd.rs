//! Gradient descent of the CUDA engine.

use twofour_cuda::layer::{DeviceBuffer, LayerContext};

use super::{
    CudaBuffer, CudaSparseLinear, CudaStepGuard,
    optimizer::{decay_of, shape_of},
};
use crate::{
    Result, cuda as kernels,
    cuda::{SgdSettings, SgdTensors},
    engine::{ParameterState, SgdStep},
    operands::expect_unscaled,
};

/// A step of parameters.
pub(super) fn step(
    context: &LayerContext,
    step: &SgdStep,
    parameters: Vec<ParameterState<'_, CudaBuffer, CudaSparseLinear>>,
    guard: Option<&CudaStepGuard>,
) -> Result<()> {
    // One factor for all parameters.
    let own = match guard {
        Some(_) => expect_unscaled("cuda", step.gradient_scale).map(|()| None)?,
        None => Some(DeviceBuffer::from_host(context, &[step.gradient_scale])?),
    };
    let SgdStep { learning_rate, momentum, weight_decay, .. } = *step;
    let settings = SgdSettings { learning_rate, momentum, weight_decay };
    for parameter in parameters {
        let (shape, sparse) = (shape_of(&parameter), parameter.sparse);
        let ParameterState { master, gradient, first, copy, .. } = parameter;
        let factor = guard.map(CudaStepGuard::factor).transpose()?;
        let tensors = SgdTensors {
            weight: master.slice_mut(),
            copy: copy.map(CudaBuffer::slice_mut),
            gradient: gradient.slice(),
            momentum: first.slice_mut(),
            gradient_scale: factor.or(own.as_ref().map(DeviceBuffer::as_slice)),
            skip: guard.map(CudaStepGuard::skip).transpose()?,
        };
        let pruned_decay = sparse.map(CudaSparseLinear::layer).zip(decay_of(step.pruned_decay)?);
        kernels::sgd(context, shape, tensors, pruned_decay, settings)?;
    }
    Ok(())
}
