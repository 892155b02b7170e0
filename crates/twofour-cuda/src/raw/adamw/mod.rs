//! AdamW on the device, with masked decay in the same pass (Loshchilov and Hutter, "Decoupled Weight Decay
//! Regularization", ICLR 2019; masked decay: [`twofour::estimate::masked_decay`]). Results are bit for bit those of the
//! `twofour-candle` crate's optimizer on a CPU, and in the phases of [`AdamW::step_in_phase`] those of the `twofour-nn`
//! crate's.
//!
//! Calls only launch kernels: they neither allocate nor synchronize, and a CUDA graph can capture them. A step's number
//! and learning rate are either arguments of the call ([`StepNumber::Host`]), which a graph repeats, or in device
//! memory ([`StepNumber::Device`]), which [`AdamW::advance`] updates at each replay.

mod launch;
mod operands;
mod together;

use launch::{AdamWNumbers, AdamWParameters, ChangesParameters, RawSchedule, corrected};
pub use operands::{
    AdamWCopy, AdamWPhase, AdamWSchedule, AdamWSettings, AdamWState, AdamWStep, MaskedDecay, SecondMoment, StepNumber,
};

use twofour::adamw_step::ChangeMean;

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::{expect_multiple, expect_pointers},
    device::{Kernel, Launch},
    raw::{float_types::FLOAT_TYPES, grid::BLOCK, headers},
    source::{File, Source, Support},
};

/// The kernel for gradients of one data type, on one device.
#[derive(Debug, Clone)]
pub struct AdamW {
    gradient: DataType,
    kernel: Kernel,
    watched: Kernel,
    watched_by_logarithm: Kernel,
    sum_changes: Kernel,
    advance: Kernel,
    together: Kernel,
}

fn source(gradient: DataType) -> Source {
    let kernel = File::new("adamw/kernel.cu", include_str!("kernel.cu"));
    Source::new(format!("adamw-{gradient}"), Support::ALL)
        .define(format!("#define GRADIENT {}\n", gradient.definition()))
        .with([headers::COMMON, kernel])
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    FLOAT_TYPES.into_iter().map(source).collect()
}

fn expect_schedule(schedule: AdamWSchedule) -> Result<()> {
    let AdamWSchedule { step, learning_rate, numbers } = schedule;
    expect_pointers(&[("number of the step", step, 8), ("learning rate", learning_rate, 8), ("numbers", numbers, 16)])
}

impl AdamW {
    /// Loads the kernel for gradients of f32, f16 or bf16.
    ///
    /// # Errors
    /// [`Error::Gradient`] for other types; those of compiling and loading.
    pub fn new(device: &Device, gradient: DataType) -> Result<Self> {
        if !FLOAT_TYPES.contains(&gradient) {
            return Err(Error::Gradient { element: gradient });
        }
        let source = source(gradient);
        Ok(Self {
            gradient,
            kernel: device.kernel(&source, "step")?,
            watched: device.kernel(&source, "watched_step")?,
            watched_by_logarithm: device.kernel(&source, "logarithm_step")?,
            sum_changes: device.kernel(&source, "sum_changes")?,
            advance: device.kernel(&source, "advance")?,
            together: device.kernel(&source, "step_together")?,
        })
    }

    /// Counts a step on the device, and computes the constants that [`AdamW::step`] reads from the step's number and
    /// learning rate. Requires one call for each step, for all parameters. The learning rate of `settings` is ignored.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned, [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid until the stream has passed this call, and nothing else writes there; the stream is of
    /// this device.
    pub unsafe fn advance(&self, stream: Stream, schedule: AdamWSchedule, settings: AdamWSettings) -> Result<()> {
        // SAFETY: this function requires the same; there is no flag.
        unsafe { self.advance_unless(stream, schedule, settings, None) }
    }

    /// As [`AdamW::advance`], but counts no step where a u32 in device memory is not 0 when the kernel runs; the next
    /// steps then require the same flag in [`AdamWStep::skip`].
    ///
    /// # Errors
    /// Those of [`AdamW::advance`].
    ///
    /// # Safety
    /// That of [`AdamW::advance`], for the flag too.
    pub unsafe fn advance_unless(
        &self,
        stream: Stream,
        schedule: AdamWSchedule,
        settings: AdamWSettings,
        skip: Option<DevicePtr>,
    ) -> Result<()> {
        expect_schedule(schedule)?;
        if let Some(skip) = skip {
            expect_pointers(&[("flag of skipped steps", skip, 4)])?;
        }
        let AdamWSchedule { step, learning_rate, numbers } = schedule;
        let AdamWSettings { beta1, beta2, weight_decay, .. } = settings;
        let parameters =
            RawSchedule { step, learning_rate, numbers, beta1, beta2, weight_decay, skip: skip.unwrap_or(0) };
        // SAFETY: the structure has the kernel's layout, and pointers and stream are valid as this function requires.
        unsafe { self.advance.launch(stream, Launch::simple((1, 1), 1), &parameters) }
    }

    /// Updates a parameter and its moments in place.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to 16 bytes (copy: 8; scale and flag: 4; tiles: 2),
    /// [`Error::Multiple`] where there is a mask and rows or columns are not multiples of 4, [`Error::TooLarge`],
    /// [`Error::Dimension`] for step 0, [`Error::DataType`] for a copy of another type than f16 and bf16,
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has passed this call, and nothing else
    /// writes there; the stream is of this device.
    pub unsafe fn step(
        &self,
        stream: Stream,
        parameter: AdamWState,
        settings: AdamWSettings,
        step: AdamWStep,
    ) -> Result<()> {
        // SAFETY: this function requires the same; nothing is watched.
        unsafe { self.step_in_phase(stream, parameter, settings, step, AdamWPhase::default()) }
    }

    /// Returns the bytes of partial sums that [`SecondMoment::Watched`] needs for a parameter of so many elements.
    pub fn watched_bytes(elements: usize) -> usize {
        elements.div_ceil(4 * BLOCK as usize) * size_of::<f64>()
    }

    /// As [`AdamW::step`], with a second moment that is watched or frozen, and decay of pruned elements that does not
    /// pass through the moments: bit for bit the engine of the `twofour-nn` crate on a CPU, but for the order in which
    /// changes are summed.
    ///
    /// # Errors
    /// Those of [`AdamW::step`], with pointers of the sum of changes aligned to 4 bytes and of partial sums to 8;
    /// [`Error::Dimension`] also where the second moment is frozen at step 0.
    ///
    /// # Safety
    /// That of [`AdamW::step`], for the memory of [`SecondMoment::Watched`] too.
    pub unsafe fn step_in_phase(
        &self,
        stream: Stream,
        parameter: AdamWState,
        settings: AdamWSettings,
        step: AdamWStep,
        phase: AdamWPhase,
    ) -> Result<()> {
        let mut parameters = parameters_of(parameter, settings, step, phase)?;
        let watched = match phase.second_moment {
            SecondMoment::Watched { changes, partial, mean } => {
                expect_pointers(&[("sum of changes", changes, 4)])?;
                if parameters.count > 0 {
                    expect_pointers(&[("partial sums of changes", partial, 8)])?;
                }
                Some((changes, partial, mean))
            }
            SecondMoment::Moving | SecondMoment::Frozen { .. } => None,
        };
        let blocks = parameters.count.div_ceil(4 * u64::from(BLOCK)) as u32;
        let sum_changes = || match watched {
            None => Ok(()),
            Some((sum, partial, _)) => {
                let parameters = ChangesParameters { partial, sum, count: blocks };
                // SAFETY: the structure has the kernel's layout; there are as many partial sums as blocks, and the
                // stream is of the device, as this function requires.
                unsafe { self.sum_changes.launch(stream, Launch::simple((1, 1), BLOCK), &parameters) }
            }
        };
        if parameters.count == 0 {
            return sum_changes();
        }
        parameters.partial = watched.map_or(0, |(_, partial, _)| partial);
        let kernel = match watched {
            None => &self.kernel,
            Some((.., ChangeMean::Arithmetic)) => &self.watched,
            Some((.., ChangeMean::Geometric)) => &self.watched_by_logarithm,
        };
        // SAFETY: the structure has the kernel's layout, and pointers and stream are valid as this function requires.
        unsafe { kernel.launch(stream, Launch::simple((blocks, 1), BLOCK), &parameters) }?;
        sum_changes()
    }

    /// Returns the data type of the gradients.
    pub fn gradient(&self) -> DataType {
        self.gradient
    }
}

/// Checks a parameter's step, and returns what its kernel reads, without the partial sums of a watched second moment.
fn parameters_of(
    parameter: AdamWState,
    settings: AdamWSettings,
    step: AdamWStep,
    phase: AdamWPhase,
) -> Result<AdamWParameters> {
    let AdamWState { weight, gradient, first, second, copy, rows, cols } = parameter;
    let too_large = Error::TooLarge { rows, cols };
    let count = (rows as u64).checked_mul(cols as u64).filter(|_| cols <= u32::MAX as usize);
    let Some(count) = count.filter(|count| count.div_ceil(4 * u64::from(BLOCK)) <= i32::MAX as u64) else {
        return Err(too_large);
    };
    let (numbers, numbers_at, rate_at) = match step.number {
        StepNumber::Host(0) => {
            return Err(Error::Dimension { what: "number of the step", size: 0, most: usize::MAX });
        }
        StepNumber::Host(number) => (AdamWNumbers::of(number, settings), 0, 0),
        StepNumber::Device(schedule) => {
            expect_schedule(schedule)?;
            (AdamWNumbers::default(), schedule.numbers, schedule.learning_rate)
        }
    };
    let AdamWSettings { learning_rate, beta1, beta2, epsilon, weight_decay } = settings;
    let (frozen_scale, epsilon) = match phase.second_moment {
        SecondMoment::Frozen { at: 0 } => {
            let what = "number of the step that the second moment is frozen at";
            return Err(Error::Dimension { what, size: 0, most: usize::MAX });
        }
        SecondMoment::Frozen { at } => (Some(corrected(beta2, at)), epsilon.powf(0.75)),
        SecondMoment::Moving | SecondMoment::Watched { .. } => (None, epsilon),
    };
    if step.masked_decay.is_some() {
        expect_multiple("rows of the parameter", rows, 4)?;
        expect_multiple("columns of the parameter", cols, 4)?;
    }
    if count > 0 {
        expect_pointers(&[
            ("weight", weight, 16),
            ("gradient", gradient, 16),
            ("first moment", first, 16),
            ("second moment", second, 16),
        ])?;
        if let Some(MaskedDecay { tiles, .. }) = step.masked_decay {
            expect_pointers(&[("mask of tiles", tiles, 2)])?;
        }
        if let Some(scale) = step.gradient_scale {
            expect_pointers(&[("scale of the gradient", scale, 4)])?;
        }
        if let Some(skip) = step.skip {
            expect_pointers(&[("flag of skipped steps", skip, 4)])?;
        }
        if let Some(copy) = copy {
            expect_pointers(&[("copy of the weight", copy.address, 8)])?;
            if !matches!(copy.dtype, DataType::F16 | DataType::BF16) {
                let operation = "the copy of a weight in an AdamW step";
                return Err(Error::DataType { operation, dtype: copy.dtype, supported: "f16, bf16" });
            }
        }
    }
    let decays_pruned = step.masked_decay.is_some() && phase.pruned_weight_decay != 0.0;
    Ok(AdamWParameters {
        weight,
        gradient,
        first,
        second,
        tiles: step.masked_decay.map_or(0, |masked| masked.tiles),
        gradient_scale: step.gradient_scale.unwrap_or(0),
        numbers_at,
        copy: copy.map_or(0, |copy| copy.address),
        skip: step.skip.unwrap_or(0),
        rate_at,
        partial: 0,
        count,
        rate: learning_rate,
        pruned_decay: weight_decay + phase.pruned_weight_decay,
        cols: cols as u32,
        copy_is_bf16: u32::from(copy.is_some_and(|copy| copy.dtype == DataType::BF16)),
        is_frozen: u32::from(frozen_scale.is_some()),
        decays_pruned: u32::from(decays_pruned),
        masked_decay: step.masked_decay.map_or(0.0, |masked| masked.strength),
        beta1: beta1 as f32,
        rest1: (1.0 - beta1) as f32,
        beta2: beta2 as f32,
        rest2: (1.0 - beta2) as f32,
        epsilon: epsilon as f32,
        frozen_scale: frozen_scale.unwrap_or(0.0),
        numbers,
    })
}
