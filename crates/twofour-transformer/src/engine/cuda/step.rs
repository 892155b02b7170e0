//! The end of a training step on a GPU.

use std::fmt::Display;

use super::{CudaBuffer, CudaEngine, CudaSparseLinear, CudaStepGuard, optimizer, sgd, sparse};
use crate::{
    Error, Result,
    engine::{LayerRefresh, OptimizerStep, ParameterState, StepFindings, StepLimits, StepOperations, StepPhase},
};

impl StepOperations for CudaEngine {
    type StepGuard = CudaStepGuard;

    fn step_guard(&self, layers: usize) -> Result<CudaStepGuard> {
        CudaStepGuard::new(&self.context, layers)
    }

    fn judge(
        &self,
        gradients: &[&CudaBuffer],
        loss: &CudaBuffer,
        limits: StepLimits,
        guard: &mut CudaStepGuard,
    ) -> Result<()> {
        guard.judge(&self.context, gradients, loss, limits)
    }

    fn findings(&self, guard: &mut CudaStepGuard, layers: &[&CudaSparseLinear]) -> Result<StepFindings> {
        guard.findings(&self.context, layers)
    }

    fn refresh(
        &self,
        layers: Vec<LayerRefresh<'_, CudaBuffer, CudaSparseLinear>>,
        guard: &CudaStepGuard,
    ) -> Result<()> {
        sparse::refresh(layers, guard)
    }

    fn gradient_norm(&self, gradients: &[&CudaBuffer]) -> Result<f64> {
        optimizer::norm((&self.context, &self.pool), gradients)
    }

    fn step(
        &self,
        step: &OptimizerStep,
        parameters: Vec<ParameterState<'_, CudaBuffer, CudaSparseLinear>>,
        guard: Option<&CudaStepGuard>,
    ) -> Result<f64> {
        match step {
            OptimizerStep::AdamW(step) => self.optimizer()?.step(&self.context, step, parameters, guard),
            OptimizerStep::Sgd(step) => sgd::step(&self.context, step, parameters, guard).map(|()| 0.0),
        }
    }

    fn repeat<X: From<Error> + Display>(
        &self,
        key: u64,
        update: Option<(f64, u64)>,
        mut work: impl FnMut() -> Result<(), X>,
    ) -> Result<(), X> {
        if let Some((learning_rate, step)) = update {
            self.optimizer()?.begin(learning_rate, step)?;
        }
        self.repeat_step(key, &mut work)
    }

    fn take_note(&self) -> Option<String> {
        self.repeats().take_note()
    }

    fn begin_phase(&self, phase: StepPhase) -> Result<()> {
        match self.phases().as_mut() {
            Some(marks) => Ok(marks.begin(phase.name())?),
            None => Ok(()),
        }
    }
}
