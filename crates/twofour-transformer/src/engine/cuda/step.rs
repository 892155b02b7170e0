//! The end of a training step on a GPU.

use std::fmt::Display;

use super::{CudaBuffer, CudaEngine, CudaSparseLinear, CudaStepGuard, control, optimizer, sgd, sparse};
use crate::{
    Error, Result,
    engine::{
        AdamWState, AdamWStep, LayerRefresh, SgdState, SgdStep, SparseLayer as _, StepFindings, StepLimits,
        StepOperations, StepPhase,
    },
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
        layer: &mut CudaSparseLinear,
        master: &CudaBuffer,
        selects_mask: bool,
        guard: &CudaStepGuard,
    ) -> Result<()> {
        // Packing again what a skipped step left as it was changes nothing.
        if selects_mask { layer.remask_unless(master, guard.skip()?) } else { layer.repack(master) }
    }

    fn refresh_together(
        &self,
        layers: Vec<LayerRefresh<'_, CudaBuffer, CudaSparseLinear>>,
        guard: &CudaStepGuard,
    ) -> Result<()> {
        sparse::refresh_together(layers, guard)
    }

    fn gradient_norm(&self, gradients: &[&CudaBuffer]) -> Result<f64> {
        optimizer::norm((&self.context, &self.pool), gradients)
    }

    fn adamw(
        &self,
        step: &AdamWStep,
        state: AdamWState<'_, CudaBuffer, CudaSparseLinear>,
        guard: Option<&CudaStepGuard>,
    ) -> Result<f64> {
        self.optimizer()?.step(&self.context, step, state, guard)
    }

    fn adamw_together(
        &self,
        step: &AdamWStep,
        states: Vec<AdamWState<'_, CudaBuffer, CudaSparseLinear>>,
        guard: Option<&CudaStepGuard>,
    ) -> Result<f64> {
        self.optimizer()?.step_together(&self.context, step, states, guard)
    }

    fn begin_update(&self, learning_rate: f64, step: u64) -> Result<()> {
        self.optimizer()?.begin(learning_rate, step)
    }

    fn repeat<X: From<Error> + Display>(&self, key: u64, mut work: impl FnMut() -> Result<(), X>) -> Result<(), X> {
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

    fn sgd(
        &self,
        step: &SgdStep,
        state: SgdState<'_, CudaBuffer, CudaSparseLinear>,
        guard: Option<&CudaStepGuard>,
    ) -> Result<()> {
        let mut scale = self.gradient_scale.lock().map_err(|_| control::after_panic())?;
        sgd::step(&self.context, &mut scale, step, state, guard)
    }
}
