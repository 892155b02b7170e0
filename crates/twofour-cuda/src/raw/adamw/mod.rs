//! AdamW on the device, with masked decay in the same pass (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; masked decay:
//! [`twofour::estimate::masked_decay`]). Results are bit for bit those of the `twofour-candle` crate's optimizer on a CPU.
//!
//! Calls only launch kernels: they neither allocate nor synchronize, and a CUDA graph can capture them. A step's number and learning rate are either
//! arguments of the call ([`StepNumber::Host`]), which a graph repeats, or in device memory ([`StepNumber::Device`]), which [`AdamW::advance`]
//! updates at each replay.

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::{expect_multiple, expect_pointers},
    device::{Kernel, Launch},
    raw::{float_types::FLOAT_TYPES, grid::BLOCK, headers},
    source::{File, Source, Support},
};

/// The optimizer's hyperparameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay rate of the first moment, the mean of gradients.
    pub beta1: f64,
    /// Decay rate of the second moment, the mean of squared gradients.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay of all elements; it is multiplied by the learning rate.
    pub weight_decay: f64,
}

/// Decay of pruned elements, added to their gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaskedDecay {
    /// The mask, in the format of [`crate::raw::prune::BothWays::tiles`].
    pub tiles: DevicePtr,
    /// The factor that pruned elements are multiplied by before they are added to their gradient.
    pub strength: f32,
}

/// A copy of a weight in 16 bits, which GEMMs read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdamWCopy {
    /// The copy, of as many elements as the weight, aligned to 8 bytes.
    pub address: DevicePtr,
    /// f16 or bf16.
    pub dtype: DataType,
}

/// A parameter with its gradient and moments, `[rows, cols]` each.
#[derive(Debug, Clone, Copy)]
pub struct AdamWState {
    /// The dense master weight, f32.
    pub weight: DevicePtr,
    /// The gradient.
    pub gradient: DevicePtr,
    /// The first moment, f32; initially zeros.
    pub first: DevicePtr,
    /// The second moment, f32; initially zeros.
    pub second: DevicePtr,
    /// A copy of the weight, written in the same pass.
    pub copy: Option<AdamWCopy>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// The number and learning rate of steps in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdamWSchedule {
    /// A u64: the number of completed steps; initially 0.
    pub step: DevicePtr,
    /// An f64: the learning rate of the next step.
    pub learning_rate: DevicePtr,
    /// 16 bytes for [`AdamW::advance`] to write and [`AdamW::step`] to read, aligned to 16.
    pub numbers: DevicePtr,
}

/// The source of a step's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepNumber {
    /// This number, counted from 1, with the learning rate of the [`AdamWSettings`].
    Host(u64),
    /// The number and learning rate of the last [`AdamW::advance`].
    Device(AdamWSchedule),
}

/// A step of the optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// The step's number.
    pub number: StepNumber,
    /// Masked decay.
    pub masked_decay: Option<MaskedDecay>,
    /// An f32 that gradients are multiplied by first: for clipping, or to undo loss scaling. It does not scale masked decay.
    pub gradient_scale: Option<DevicePtr>,
    /// A u32: where it is not 0 when the kernel runs, the step writes nothing. For steps whose gradients are not finite.
    pub skip: Option<DevicePtr>,
}

/// The kernel for gradients of one data type, on one device.
#[derive(Debug, Clone)]
pub struct AdamW {
    gradient: DataType,
    kernel: Kernel,
    advance: Kernel,
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

/// The kernel's parameters, in its memory layout.
#[repr(C)]
struct AdamWParameters {
    weight: DevicePtr,
    gradient: DevicePtr,
    first: DevicePtr,
    second: DevicePtr,
    tiles: DevicePtr,
    gradient_scale: DevicePtr,
    numbers_at: DevicePtr,
    copy: DevicePtr,
    skip: DevicePtr,
    count: u64,
    cols: u32,
    copy_is_bf16: u32,
    masked_decay: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    epsilon: f32,
    numbers: AdamWNumbers,
}

/// The constants of a step that depend on its number and learning rate, in the kernel's memory layout.
#[derive(Default)]
#[repr(C)]
struct AdamWNumbers {
    decay: f32,
    first_scale: f32,
    second_scale: f32,
    learning_rate: f32,
}

impl AdamWNumbers {
    fn of(step: u64, settings: AdamWSettings) -> Self {
        let AdamWSettings { learning_rate, beta1, beta2, weight_decay, .. } = settings;
        let corrected = |beta: f64| (1.0 / (1.0 - beta.powf(step as f64))) as f32;
        Self {
            decay: (1.0 - learning_rate * weight_decay) as f32,
            first_scale: corrected(beta1),
            second_scale: corrected(beta2),
            learning_rate: learning_rate as f32,
        }
    }
}

/// The parameters of the kernel that counts steps, in its memory layout.
#[repr(C)]
struct RawSchedule {
    step: DevicePtr,
    learning_rate: DevicePtr,
    numbers: DevicePtr,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
    skip: DevicePtr,
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
        Ok(Self { gradient, kernel: device.kernel(&source, "step")?, advance: device.kernel(&source, "advance")? })
    }

    /// Counts a step on the device, and computes the constants that [`AdamW::step`] reads from the step's number and learning rate. Requires one call
    /// for each step, for all parameters. The learning rate of `settings` is ignored.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned, [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid until the stream has passed this call, and nothing else writes there; the stream is of this device.
    pub unsafe fn advance(&self, stream: Stream, schedule: AdamWSchedule, settings: AdamWSettings) -> Result<()> {
        // SAFETY: this function requires the same; there is no flag.
        unsafe { self.advance_unless(stream, schedule, settings, None) }
    }

    /// As [`AdamW::advance`], but counts no step where a u32 in device memory is not 0 when the kernel runs; the next steps then require the same flag in
    /// [`AdamWStep::skip`].
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
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.advance.launch(stream, Launch::simple((1, 1), 1), &parameters) }
    }

    /// Updates a parameter and its moments in place.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to 16 bytes (copy: 8; scale and flag: 4; tiles: 2), [`Error::Multiple`] where there is a mask and
    /// rows or columns are not multiples of 4, [`Error::TooLarge`], [`Error::Dimension`] for step 0, [`Error::DataType`] for a copy of another type than f16 and bf16, [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has passed this call, and nothing else writes there; the stream is of this device.
    pub unsafe fn step(
        &self,
        stream: Stream,
        parameter: AdamWState,
        settings: AdamWSettings,
        step: AdamWStep,
    ) -> Result<()> {
        let AdamWState { weight, gradient, first, second, copy, rows, cols } = parameter;
        let too_large = Error::TooLarge { rows, cols };
        let count = (rows as u64).checked_mul(cols as u64).filter(|_| cols <= u32::MAX as usize);
        let Some(count) = count.filter(|count| count.div_ceil(4 * u64::from(BLOCK)) <= i32::MAX as u64) else {
            return Err(too_large);
        };
        let (numbers, numbers_at) = match step.number {
            StepNumber::Host(0) => {
                return Err(Error::Dimension { what: "number of the step", size: 0, most: usize::MAX });
            }
            StepNumber::Host(number) => (AdamWNumbers::of(number, settings), 0),
            StepNumber::Device(schedule) => {
                expect_schedule(schedule)?;
                (AdamWNumbers::default(), schedule.numbers)
            }
        };
        if step.masked_decay.is_some() {
            expect_multiple("rows of the parameter", rows, 4)?;
            expect_multiple("columns of the parameter", cols, 4)?;
        }
        if count == 0 {
            return Ok(());
        }
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
        let AdamWSettings { beta1, beta2, epsilon, .. } = settings;
        let parameters = AdamWParameters {
            weight,
            gradient,
            first,
            second,
            tiles: step.masked_decay.map_or(0, |masked| masked.tiles),
            gradient_scale: step.gradient_scale.unwrap_or(0),
            numbers_at,
            copy: copy.map_or(0, |copy| copy.address),
            skip: step.skip.unwrap_or(0),
            count,
            cols: cols as u32,
            copy_is_bf16: u32::from(copy.is_some_and(|copy| copy.dtype == DataType::BF16)),
            masked_decay: step.masked_decay.map_or(0.0, |masked| masked.strength),
            beta1: beta1 as f32,
            rest1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
            epsilon: epsilon as f32,
            numbers,
        };
        let blocks = count.div_ceil(4 * u64::from(BLOCK)) as u32;
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.kernel.launch(stream, Launch::simple((blocks, 1), BLOCK), &parameters) }
    }

    /// Returns the data type of the gradients.
    pub fn gradient(&self) -> DataType {
        self.gradient
    }
}
