//! The optimizer of the CUDA engine.

use twofour::{DataType, adamw_step::ChangeMean};
use twofour_cuda::layer::{DeviceBuffer, LayerContext};

use super::{CudaBuffer, CudaSparseLinear, CudaStepGuard, Pool};
use crate::operands::{expect_no_moment_decay, expect_second, expect_unscaled};
use crate::{
    Result, cuda as kernels,
    cuda::{AdamWPhase, AdamWSettings, AdamWTensors, ClippedGradients, GradientClip, StepSchedule},
    engine::{AdamWStep, Buffer as _, ParameterState, PrunedDecay, SecondMoment},
};

/// The norm of all gradients together. Waits.
pub(super) fn norm((context, pool): (&LayerContext, &Pool), gradients: &[&CudaBuffer]) -> Result<f64> {
    let take = |dtype| pool.take(context, dtype, 1);
    let (mut norm, mut scale, mut non_finite) = (take(DataType::F32)?, take(DataType::F32)?, take(DataType::I32)?);
    let to = ClippedGradients {
        norm: norm.as_slice_mut(),
        scale: scale.as_slice_mut(),
        non_finite: non_finite.as_slice_mut(),
    };
    let slices: Vec<_> = gradients.iter().map(|gradient| gradient.slice()).collect();
    kernels::clip_gradients(context, &slices, GradientClip::to(f32::INFINITY), to)?;
    let found = norm.to_host::<f32>()?.first().copied().unwrap_or(f32::NAN);
    [norm, scale, non_finite].into_iter().for_each(|buffer| pool.give(buffer));
    Ok(f64::from(found))
}

/// The constants of a step for one weight decay.
#[derive(Debug)]
struct Schedule {
    settings: AdamWSettings,
    /// The number of the step whose predecessor, with the learning rate, is in device memory or on its way there.
    number: u64,
    /// Whether the constants of that step have been launched.
    is_launched: bool,
    memory: StepSchedule,
}

/// The constants of a step in device memory, for each of the step's weight decays.
#[derive(Debug)]
pub(super) struct Optimizer {
    schedules: Vec<Schedule>,
    scale: DeviceBuffer,
    scale_value: f32,
    /// The sum of the changes of a watched second moment.
    changes: DeviceBuffer,
}

impl Optimizer {
    pub(super) fn new(context: &LayerContext) -> Result<Self> {
        let [scale, changes] = [DeviceBuffer::from_host(context, &[1f32])?, DeviceBuffer::from_host(context, &[0f32])?];
        Ok(Optimizer { schedules: vec![], scale, scale_value: 1.0, changes })
    }

    /// Returns the sum of the changes of second moments where the step watches them, and then waits; otherwise 0.
    /// Parameters without masks are updated together where nothing of them is watched or frozen.
    pub(super) fn step(
        &mut self,
        context: &LayerContext,
        step: &AdamWStep,
        parameters: Vec<ParameterState<'_, CudaBuffer, CudaSparseLinear>>,
        guard: Option<&CudaStepGuard>,
    ) -> Result<f64> {
        let is_plain = step.second_moment == SecondMoment::Moving && parameters.iter().all(|one| one.sparse.is_none());
        if parameters.len() < 2 || !is_plain {
            let each = parameters.into_iter().map(|parameter| self.step_one(context, step, parameter, guard));
            return each.sum();
        }
        let (at, settings) = self.numbers(context, step, guard)?;
        let tensors = parameters.into_iter().map(|parameter| tensors_of(&self.scale, parameter, guard));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        kernels::adamw_together(context, &tensors, &self.schedules[at].memory, settings)?;
        Ok(0.0)
    }

    fn step_one(
        &mut self,
        context: &LayerContext,
        step: &AdamWStep,
        parameter: ParameterState<'_, CudaBuffer, CudaSparseLinear>,
        guard: Option<&CudaStepGuard>,
    ) -> Result<f64> {
        let sparse = parameter.sparse;
        let (at, settings) = self.numbers(context, step, guard)?;
        let shape = shape_of(&parameter);
        let tensors = tensors_of(&self.scale, parameter, guard)?;
        let second_moment = match step.second_moment {
            SecondMoment::Moving => kernels::SecondMoment::Moving,
            SecondMoment::Watched | SecondMoment::WatchedByLogarithm => {
                let mean = match step.second_moment {
                    SecondMoment::WatchedByLogarithm => ChangeMean::Geometric,
                    _ => ChangeMean::Arithmetic,
                };
                kernels::SecondMoment::Watched { changes: self.changes.as_slice_mut(), mean }
            }
            SecondMoment::Frozen { at } => kernels::SecondMoment::Frozen { at },
        };
        let pruned_decay = sparse.map(CudaSparseLinear::layer).zip(decay_of(step.pruned_decay)?);
        let phase = AdamWPhase { second_moment, pruned_decay };
        kernels::adamw_in_phase(context, shape, tensors, phase, &self.schedules[at].memory, settings)?;
        match step.second_moment {
            SecondMoment::Watched | SecondMoment::WatchedByLogarithm => {
                Ok(self.changes.to_host::<f32>()?.first().copied().map_or(f64::NAN, f64::from))
            }
            SecondMoment::Moving | SecondMoment::Frozen { .. } => Ok(0.0),
        }
    }

    /// Brings a step's numbers to the device. Returns the index of the schedule that holds them, and the settings.
    fn numbers(
        &mut self,
        context: &LayerContext,
        step: &AdamWStep,
        guard: Option<&CudaStepGuard>,
    ) -> Result<(usize, AdamWSettings)> {
        if guard.is_some() {
            expect_unscaled("cuda", step.gradient_scale)?;
        } else if self.scale_value.to_bits() != step.gradient_scale.to_bits() {
            self.scale.write(&[step.gradient_scale])?;
            self.scale_value = step.gradient_scale;
        }
        let AdamWStep { learning_rate, beta1, beta2, epsilon, weight_decay, step: number, .. } = *step;
        let settings = AdamWSettings { learning_rate, beta1, beta2, epsilon, weight_decay };
        Ok((self.schedule(context, settings, number)?, settings))
    }

    /// Brings learning rate and number of the next step to the device.
    pub(super) fn begin(&mut self, learning_rate: f64, number: u64) -> Result<()> {
        for schedule in &mut self.schedules {
            schedule.settings.learning_rate = learning_rate;
            schedule.write(number)?;
        }
        Ok(())
    }

    /// Launches constants again: those that were launched before were captured in a graph that never runs.
    pub(super) fn forget_launches(&mut self) {
        self.schedules.iter_mut().for_each(|schedule| schedule.is_launched = false);
    }

    /// The index of the schedule that holds the constants of this step.
    fn schedule(&mut self, context: &LayerContext, settings: AdamWSettings, number: u64) -> Result<usize> {
        let decay = settings.weight_decay.to_bits();
        let found = self.schedules.iter().position(|own| own.settings.weight_decay.to_bits() == decay);
        let at = match found {
            Some(at) => at,
            None => {
                let memory = StepSchedule::new(context)?;
                self.schedules.push(Schedule { settings, number: 0, is_launched: false, memory });
                self.schedules.len() - 1
            }
        };
        let own = &mut self.schedules[at];
        if own.settings != settings || own.number != number {
            own.settings = settings;
            own.write(number)?;
        }
        if !own.is_launched {
            own.memory.advance(settings, None)?;
            own.is_launched = true;
        }
        Ok(at)
    }
}

impl Schedule {
    fn write(&mut self, number: u64) -> Result<()> {
        (self.number, self.is_launched) = (number, false);
        Ok(self.memory.set(number.saturating_sub(1), self.settings.learning_rate)?)
    }
}

/// Returns the rows and columns of a parameter: a mask covers the matrix of its layer; other parameters are one row.
pub(super) fn shape_of(parameter: &ParameterState<'_, CudaBuffer, CudaSparseLinear>) -> (usize, usize) {
    let of = |sparse: &CudaSparseLinear| (sparse.layer().out_features(), sparse.layer().in_features());
    parameter.sparse.map_or((1, parameter.master.len()), of)
}

/// Returns the decay as kernels take it.
pub(super) fn decay_of(decay: PrunedDecay) -> Result<Option<kernels::PrunedDecay>> {
    expect_no_moment_decay("cuda", decay)?;
    Ok(match decay {
        PrunedDecay::None | PrunedDecay::Moment { .. } => None,
        PrunedDecay::Gradient { strength } => Some(kernels::PrunedDecay::Gradient { strength }),
        PrunedDecay::Weight { strength } => Some(kernels::PrunedDecay::Weight { strength }),
    })
}

/// What a step of a parameter reads and writes; without a guard its gradient is multiplied by `scale`.
fn tensors_of<'a>(
    scale: &'a DeviceBuffer,
    parameter: ParameterState<'a, CudaBuffer, CudaSparseLinear>,
    guard: Option<&'a CudaStepGuard>,
) -> Result<AdamWTensors<'a>> {
    let ParameterState { master, gradient, first, second, copy, .. } = parameter;
    Ok(AdamWTensors {
        weight: master.slice_mut(),
        copy: copy.map(CudaBuffer::slice_mut),
        gradient: gradient.slice(),
        first: first.slice_mut(),
        second: expect_second("cuda", second)?.slice_mut(),
        gradient_scale: Some(guard.map_or_else(|| Ok(scale.as_slice()), CudaStepGuard::factor)?),
        skip: guard.map(CudaStepGuard::skip).transpose()?,
    })
}
