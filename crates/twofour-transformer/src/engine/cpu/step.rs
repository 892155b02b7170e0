//! The end of a training step on the CPU.

use super::{CpuBuffer, CpuEngine, CpuSparseLinear, buffer::expect_length};
use crate::{
    Result,
    cpu::{self, adamw::AdamWSlices, sgd::SgdSlices},
    engine::{
        AdamWState, AdamWStep, Buffer as _, Memory as _, SgdState, SgdStep, SparseLayer as _, StepFindings, StepLimits,
        StepOperations, clip_factor, operands::expect_unscaled,
    },
};

/// What was decided about a step.
#[derive(Debug, Clone, Copy)]
pub struct CpuStepGuard {
    loss: f64,
    norm: f64,
    /// What gradients are multiplied by.
    factor: f32,
}

impl CpuStepGuard {
    fn skips(&self) -> bool {
        !(self.loss.is_finite() && self.norm.is_finite())
    }
}

impl StepOperations for CpuEngine {
    type StepGuard = CpuStepGuard;

    fn step_guard(&self, _: usize) -> Result<CpuStepGuard> {
        Ok(CpuStepGuard { loss: 0.0, norm: 0.0, factor: 1.0 })
    }

    fn judge(
        &self,
        gradients: &[&CpuBuffer],
        loss: &CpuBuffer,
        limits: StepLimits,
        guard: &mut CpuStepGuard,
    ) -> Result<()> {
        let StepLimits { clip_norm, loss_scale } = limits;
        expect_length("the loss", 1, loss.len())?;
        let norm = self.gradient_norm(gradients)? / f64::from(loss_scale);
        let factor = clip_factor(norm, clip_norm) / f64::from(loss_scale);
        *guard = CpuStepGuard { loss: f64::from(loss.floats()?[0]), norm, factor: factor as f32 };
        Ok(())
    }

    fn findings(&self, guard: &mut CpuStepGuard, layers: &[&CpuSparseLinear]) -> Result<StepFindings> {
        let flips = layers.iter().map(|layer| layer.flips()).collect::<Result<_>>()?;
        Ok(StepFindings { loss: guard.loss, norm: guard.norm, flips })
    }

    fn refresh(
        &self,
        layer: &mut CpuSparseLinear,
        master: &CpuBuffer,
        selects_mask: bool,
        guard: &CpuStepGuard,
    ) -> Result<()> {
        match (guard.skips(), selects_mask) {
            (true, _) => Ok(()),
            (false, true) => layer.remask(master),
            (false, false) => layer.repack(master),
        }
    }

    fn gradient_norm(&self, gradients: &[&CpuBuffer]) -> Result<f64> {
        let mut sum = 0.0;
        for gradient in gradients {
            sum += cpu::adamw::sum_of_squares(gradient.floats()?);
        }
        Ok(sum.sqrt())
    }

    fn adamw(
        &self,
        step: &AdamWStep,
        state: AdamWState<'_, CpuBuffer, CpuSparseLinear>,
        guard: Option<&CpuStepGuard>,
    ) -> Result<f64> {
        let Some(gradient_scale) = scale_of(guard, step.gradient_scale)? else { return Ok(0.0) };
        let step = &AdamWStep { gradient_scale, ..*step };
        let AdamWState { master, gradient, first, second, copy, sparse } = state;
        for (what, found) in [("a gradient", gradient), ("a first moment", &*first), ("a second moment", &*second)] {
            expect_length(what, master.len(), found.len())?;
        }
        let mask = sparse.map(|sparse| sparse.layer().mask());
        if let Some(mask) = mask {
            expect_length("a masked parameter", mask.rows() * mask.cols(), master.len())?;
        }
        let slices = AdamWSlices {
            parameter: master.floats_mut()?,
            gradient: gradient.floats()?,
            first: first.floats_mut()?,
            second: second.floats_mut()?,
        };
        let changes = cpu::adamw::step(step, slices, mask);
        if let Some(copy) = copy {
            self.round(master, copy)?;
        }
        Ok(changes)
    }

    fn sgd(
        &self,
        step: &SgdStep,
        state: SgdState<'_, CpuBuffer, CpuSparseLinear>,
        guard: Option<&CpuStepGuard>,
    ) -> Result<()> {
        let Some(gradient_scale) = scale_of(guard, step.gradient_scale)? else { return Ok(()) };
        let step = &SgdStep { gradient_scale, ..*step };
        let SgdState { master, gradient, momentum, copy, sparse } = state;
        expect_length("a gradient", master.len(), gradient.len())?;
        expect_length("a momentum", master.len(), momentum.len())?;
        let mask = sparse.map(|sparse| sparse.layer().mask());
        if let Some(mask) = mask {
            expect_length("a masked parameter", mask.rows() * mask.cols(), master.len())?;
        }
        let slices = SgdSlices {
            parameter: master.floats_mut()?,
            gradient: gradient.floats()?,
            momentum: momentum.floats_mut()?,
        };
        cpu::sgd::step(step, slices, mask);
        copy.map_or(Ok(()), |copy| self.round(master, copy))
    }
}

/// What an optimizer multiplies gradients by; none where the guard skips the step.
fn scale_of(guard: Option<&CpuStepGuard>, own: f32) -> Result<Option<f32>> {
    match guard {
        Some(guard) if guard.skips() => Ok(None),
        Some(guard) => expect_unscaled("cpu", own).map(|()| Some(guard.factor)),
        None => Ok(Some(own)),
    }
}
