//! What is captured and measured of an engine's steps.

use std::{
    fmt::Display,
    sync::{MutexGuard, PoisonError},
};

use twofour_cuda::PhaseMarks;

use super::{
    CudaEngine,
    optimizer::Optimizer,
    repeat::{Next, Repeats},
};
use crate::{Error, Result};

pub(super) fn after_panic() -> Error {
    Error::Unsupported {
        engine: "cuda",
        what: "an optimizer step after a step that panicked".to_owned(),
        remedy: "start again from the last checkpoint",
    }
}

impl CudaEngine {
    /// Whether steps are captured in CUDA graphs and replayed, as they are at first; or launched call by call.
    pub fn capture_steps(&self, captures: bool) {
        self.repeats().turn(captures);
    }

    pub(super) fn repeats(&self) -> MutexGuard<'_, Repeats> {
        self.repeats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn optimizer(&self) -> Result<MutexGuard<'_, Optimizer>> {
        self.optimizer.lock().map_err(|_| after_panic())
    }

    /// Measures the phases of the steps from now on, until [`CudaEngine::take_phases`].
    pub fn measure_phases(&self) {
        *self.phases() = Some(PhaseMarks::new(&self.context));
    }

    /// Stops measuring phases. Returns the milliseconds of device time of each phase since
    /// [`CudaEngine::measure_phases`], by [`StepPhase::name`](crate::engine::StepPhase::name); what was between steps
    /// counts as `rest`. Waits.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn take_phases(&self) -> Result<Vec<(&'static str, f64)>> {
        let marks = self.phases().take();
        marks.map_or_else(|| Ok(vec![]), |mut marks| Ok(marks.take()?))
    }

    pub(super) fn phases(&self) -> MutexGuard<'_, Option<PhaseMarks>> {
        self.phases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replays of captured steps so far.
    pub fn replayed_steps(&self) -> u64 {
        self.repeats().replays()
    }

    /// Replays a step, or captures or launches it.
    pub(super) fn repeat_step<X: From<Error> + Display>(
        &self,
        key: u64,
        work: &mut impl FnMut() -> Result<(), X>,
    ) -> Result<(), X> {
        // Marks of phases in a graph would have no time.
        if self.phases().is_some() {
            return work();
        }
        let next = self.repeats().next(key)?;
        match next {
            Next::Replayed => Ok(()),
            Next::Launch => work(),
            Next::Capture => {
                let captured = self.repeats().capture(&self.context, key, work)?;
                if captured {
                    return Ok(());
                }
                self.optimizer()?.forget_launches();
                work()
            }
        }
    }
}
