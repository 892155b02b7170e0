//! AdamW on the device, with masked decay in the same pass (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; masked decay:
//! [`twofour::estimate::masked_decay`]). The same bits as the `twofour-candle` crate's optimizer on a CPU.
//!
//! Calls only launch: they neither allocate nor wait, and may be captured in a graph. A step's number and learning rate are either numbers of the call
//! ([`StepNumber::Host`]), which a graph repeats, or read from device memory ([`StepNumber::Device`]), which [`AdamW::advance`] counts at each replay.

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::{expect_multiple, expect_pointers},
    device::{Kernel, Launch},
    headers,
    prune::BLOCK,
    source::{File, Source, Support},
};

/// The optimizer's numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// What steps are multiplied by.
    pub learning_rate: f64,
    /// What the mean of gradients keeps at each step.
    pub beta1: f64,
    /// What the mean of their squares keeps.
    pub beta2: f64,
    /// Added to the root of the mean of squares.
    pub epsilon: f64,
    /// Decoupled decay of all elements, times the learning rate.
    pub weight_decay: f64,
}

/// Decay of what a mask drops, added to its gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MaskedDecay {
    /// The mask, as [`crate::prune::BothWays::tiles`] has it.
    pub tiles: DevicePtr,
    /// What dropped elements are multiplied by.
    pub strength: f32,
}

/// A parameter with its gradient and moments, `[rows, cols]` each.
#[derive(Debug, Clone, Copy)]
pub struct AdamWState {
    /// The dense master, f32.
    pub weight: DevicePtr,
    /// Its gradient.
    pub gradient: DevicePtr,
    /// The mean of gradients, f32; zeros to begin with.
    pub first: DevicePtr,
    /// The mean of their squares, f32; zeros to begin with.
    pub second: DevicePtr,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// The number and learning rate of steps in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdamWSchedule {
    /// A u64: how many steps have been taken; 0 to begin with.
    pub step: DevicePtr,
    /// An f64: the learning rate of the next step.
    pub learning_rate: DevicePtr,
    /// 16 bytes for [`AdamW::advance`] to write and [`AdamW::step`] to read, aligned to 16.
    pub numbers: DevicePtr,
}

/// Where a step's number comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepNumber {
    /// It is this, counted from 1; the learning rate is that of the [`AdamWSettings`].
    Host(u64),
    /// It and the learning rate are those of the last [`AdamW::advance`].
    Device(AdamWSchedule),
}

/// A step of the optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Its number.
    pub number: StepNumber,
    /// Decay of what a mask drops.
    pub masked_decay: Option<MaskedDecay>,
    /// An f32 that gradients are multiplied by first: for clipping, or to undo a loss's scale. Masked decay is not.
    pub gradient_scale: Option<DevicePtr>,
}

/// The kernel for gradients of one element type, on one device.
#[derive(Debug, Clone)]
pub struct AdamW {
    gradient: DataType,
    kernel: Kernel,
    advance: Kernel,
}

/// What gradients can be made of.
const GRADIENTS: [DataType; 3] = [DataType::F32, DataType::F16, DataType::BF16];

fn source(gradient: DataType) -> Source {
    let kernel = File::new("adamw/kernel.cu", include_str!("kernel.cu"));
    Source::new(format!("adamw-{gradient}"), Support::ALL)
        .define(format!("#define GRADIENT {}\n", gradient.definition()))
        .with([headers::COMMON, kernel])
}

/// Every source.
pub(crate) fn sources() -> Vec<Source> {
    GRADIENTS.into_iter().map(source).collect()
}

/// As the kernel has it.
#[repr(C)]
struct AdamWParameters {
    weight: DevicePtr,
    gradient: DevicePtr,
    first: DevicePtr,
    second: DevicePtr,
    tiles: DevicePtr,
    gradient_scale: DevicePtr,
    numbers_at: DevicePtr,
    count: u64,
    cols: u32,
    masked_decay: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    epsilon: f32,
    numbers: AdamWNumbers,
}

/// What a step's number and learning rate come to, as the kernel has it.
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

/// As the kernel that counts steps has it.
#[repr(C)]
struct RawSchedule {
    step: DevicePtr,
    learning_rate: DevicePtr,
    numbers: DevicePtr,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
}

fn expect_schedule(schedule: AdamWSchedule) -> Result<()> {
    let AdamWSchedule { step, learning_rate, numbers } = schedule;
    expect_pointers(&[("number of the step", step, 8), ("learning rate", learning_rate, 8), ("numbers", numbers, 16)])
}

impl AdamW {
    /// For gradients of f32, f16 or bf16.
    ///
    /// # Errors
    /// [`Error::Gradient`] for others; those of compiling and loading.
    pub fn new(device: &Device, gradient: DataType) -> Result<Self> {
        if !GRADIENTS.contains(&gradient) {
            return Err(Error::Gradient { element: gradient });
        }
        let source = source(gradient);
        Ok(Self { gradient, kernel: device.kernel(&source, "step")?, advance: device.kernel(&source, "advance")? })
    }

    /// Counts a step on the device and computes from its number and learning rate what [`AdamW::step`] needs: once for each step, for all
    /// parameters. Of the settings the learning rate is not read.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned, [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid until the stream has come past this call, and nothing else writes there; the stream is of this device.
    pub unsafe fn advance(&self, stream: Stream, schedule: AdamWSchedule, settings: AdamWSettings) -> Result<()> {
        expect_schedule(schedule)?;
        let AdamWSchedule { step, learning_rate, numbers } = schedule;
        let AdamWSettings { beta1, beta2, weight_decay, .. } = settings;
        let parameters = RawSchedule { step, learning_rate, numbers, beta1, beta2, weight_decay };
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.advance.launch(stream, Launch::simple((1, 1), 1), &parameters) }
    }

    /// Updates a parameter and its moments in place.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to 16 bytes (scale: 4; tiles: 2), [`Error::Multiple`] where rows or columns are no multiples of 4 and there is a mask,
    /// [`Error::TooLarge`], [`Error::Dimension`] for a step 0, [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has come past this call, and nothing else writes there; the stream is of this
    /// device.
    pub unsafe fn step(
        &self,
        stream: Stream,
        parameter: AdamWState,
        settings: AdamWSettings,
        step: AdamWStep,
    ) -> Result<()> {
        let AdamWState { weight, gradient, first, second, rows, cols } = parameter;
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
        let AdamWSettings { beta1, beta2, epsilon, .. } = settings;
        let parameters = AdamWParameters {
            weight,
            gradient,
            first,
            second,
            tiles: step.masked_decay.map_or(0, |masked| masked.tiles),
            gradient_scale: step.gradient_scale.unwrap_or(0),
            numbers_at,
            count,
            cols: cols as u32,
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

    /// What gradients are made of.
    pub fn gradient(&self) -> DataType {
        self.gradient
    }
}
