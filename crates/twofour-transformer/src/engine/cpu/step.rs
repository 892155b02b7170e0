//! The end of a training step on the CPU.

use super::{CpuBuffer, CpuEngine, CpuSparseLinear, buffer::expect_length};
use crate::operands::{expect_no_moment_decay, expect_second, expect_unscaled};
use crate::{
    Result,
    cpu::{self, adamw::AdamWSlices, sgd::SgdSlices},
    engine::{
        AdamWStep, Buffer as _, LayerRefresh, Memory as _, OptimizerStep, ParameterState, SgdStep, SparseLayer as _,
        StepFindings, StepLimits, StepOperations, clip_factor,
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

    fn refresh(&self, layers: Vec<LayerRefresh<'_, CpuBuffer, CpuSparseLinear>>, guard: &CpuStepGuard) -> Result<()> {
        if guard.skips() {
            return Ok(());
        }
        layers.into_iter().try_for_each(|LayerRefresh { name, layer, master, selects_mask }| {
            let refreshed = if selects_mask { layer.remask(master) } else { layer.repack(master) };
            refreshed.map_err(|error| error.in_layer(name))
        })
    }

    fn gradient_norm(&self, gradients: &[&CpuBuffer]) -> Result<f64> {
        let mut sum = 0.0;
        for gradient in gradients {
            sum += cpu::adamw::sum_of_squares(gradient.floats()?);
        }
        Ok(sum.sqrt())
    }

    fn step(
        &self,
        step: &OptimizerStep,
        parameters: Vec<ParameterState<'_, CpuBuffer, CpuSparseLinear>>,
        guard: Option<&CpuStepGuard>,
    ) -> Result<f64> {
        let own = match step {
            OptimizerStep::AdamW(step) => step.gradient_scale,
            OptimizerStep::Sgd(step) => step.gradient_scale,
        };
        let Some(gradient_scale) = scale_of(guard, own)? else { return Ok(0.0) };
        let mut changes = 0.0;
        for ParameterState { master, gradient, first, second, copy, sparse } in parameters {
            expect_length("a gradient", master.len(), gradient.len())?;
            expect_length("a first moment", master.len(), first.len())?;
            let mask = sparse.map(|sparse| sparse.layer().mask());
            if let Some(mask) = mask {
                expect_length("a masked parameter", mask.rows() * mask.cols(), master.len())?;
            }
            let (parameter, gradient) = (master.floats_mut()?, gradient.floats()?);
            match step {
                OptimizerStep::AdamW(step) => {
                    let second = expect_second("cpu", second)?;
                    expect_length("a second moment", parameter.len(), second.len())?;
                    let (first, second) = (first.floats_mut()?, second.floats_mut()?);
                    let slices = AdamWSlices { parameter, gradient, first, second };
                    changes += cpu::adamw::step(&AdamWStep { gradient_scale, ..*step }, slices, mask);
                }
                OptimizerStep::Sgd(step) => {
                    expect_no_moment_decay("cpu", step.pruned_decay)?;
                    let slices = SgdSlices { parameter, gradient, momentum: first.floats_mut()? };
                    cpu::sgd::step(&SgdStep { gradient_scale, ..*step }, slices, mask);
                }
            }
            if let Some(copy) = copy {
                self.round(master, copy)?;
            }
        }
        Ok(changes)
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
