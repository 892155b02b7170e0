//! The norm of all gradients, clipping, and AdamW.

use cudarc::driver::{CudaSlice, DevicePtr as _};
use twofour::adamw_step::ChangeMean;
use twofour_cuda::{
    DataType, DevicePtr, Error, Result,
    arguments::{MAX_DIMENSION, Memory, at_if, expect_dimension, product},
    layer::{DeviceSlice, DeviceSliceMut, FreeNote, LayerContext, SparseLinear},
    raw::{
        adamw as raw,
        adamw::{AdamW, AdamWCopy, AdamWSchedule, AdamWSettings, AdamWState, AdamWStep, MaskedDecay, StepNumber},
    },
};

use super::kernels::adamw_kernels;
use crate::cuda::raw::gradient_norm::{ClipParameters, GradientNorm};

/// What [`clip_gradients`] computes, in device memory.
#[derive(Debug)]
pub struct ClippedGradients<'a> {
    /// An f32 `[1]`: the norm of the gradients, divided by the loss scale.
    pub norm: DeviceSliceMut<'a>,
    /// An f32 `[1]`: what [`adamw`] is to multiply gradients by, `min(1, clip / (norm + 10⁻⁶)) / loss_scale`; 0 where
    /// the norm is not finite.
    pub scale: DeviceSliceMut<'a>,
    /// A u32 `[1]`: 1 where the norm or the loss is NaN or infinite, otherwise 0. For [`AdamWTensors::skip`].
    pub non_finite: DeviceSliceMut<'a>,
}

/// How [`clip_gradients`] clips.
#[derive(Debug, Clone, Copy)]
pub struct GradientClip<'a> {
    /// The largest norm, infinite for no clipping.
    pub largest: f32,
    /// What the gradients are multiples of: the loss scale, or a factor of it.
    pub host_scale: f32,
    /// An f32 `[1]`: another factor of the loss scale.
    pub loss_scale: Option<DeviceSlice<'a>>,
    /// An f32 `[1]` that must be finite too: where it is not, the step is flagged as one whose norm is not finite.
    pub loss: Option<DeviceSlice<'a>>,
}

impl GradientClip<'_> {
    /// Clipping of gradients without a loss scale to this norm.
    pub fn to(largest: f32) -> Self {
        Self { largest, host_scale: 1.0, loss_scale: None, loss: None }
    }
}

/// Computes the norm of all gradients together, and the factor that removes the loss scale and clips the norm (Pascanu,
/// Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013; ε as in PyTorch's
/// `clip_grad_norm_`). Nothing is multiplied yet: the factor is an input of [`adamw`].
///
/// `gradients` are f32. Squares are summed in f64, in a fixed order.
///
/// # Errors
/// Those of [`Memory::at`] for a tensor that does not fit; [`Error::Dimension`] for too many gradients; those of
/// allocating workspace; [`Error::Driver`].
pub fn clip_gradients(
    context: &LayerContext,
    gradients: &[DeviceSlice<'_>],
    clip: GradientClip<'_>,
    to: ClippedGradients<'_>,
) -> Result<()> {
    if gradients.len() > 1 << 20 {
        return Err(Error::Dimension { what: "gradients", size: gradients.len(), most: 1 << 20 });
    }
    let address = |gradient: &DeviceSlice<'_>| {
        let at = gradient.at("a gradient", context, DataType::F32, gradient.len())?;
        Ok((at, gradient.len()))
    };
    let buffers = gradients.iter().map(address).collect::<Result<Vec<_>>>()?;
    let mut parameters = ClipParameters {
        partial: 0,
        loss_scale: at_if(clip.loss_scale.as_ref(), "the loss scale", context, DataType::F32, 1)?,
        loss: at_if(clip.loss.as_ref(), "the loss", context, DataType::F32, 1)?,
        norm: to.norm.at("the norm", context, DataType::F32, 1)?,
        scale: to.scale.at("the scale of the gradients", context, DataType::F32, 1)?,
        non_finite: to.non_finite.at("the flag of gradients that are not finite", context, DataType::I32, 1)?,
        count: 0,
        clip: clip.largest,
        host_scale: clip.host_scale,
    };
    let kernels = GradientNorm::of(context)?;
    let mut work = context.work();
    [parameters.partial] = work.parts([GradientNorm::partial_bytes(buffers.len())])?;
    // SAFETY: the slices have the lengths that are passed, the workspace has room for the partial sums, and the stream
    // is of their device.
    unsafe { kernels.run(context.raw(), &buffers, parameters) }
}

/// The number of completed steps, the learning rate and the constants of the current step, in device memory: a captured
/// step counts at each replay.
#[derive(Debug)]
pub struct StepSchedule {
    context: LayerContext,
    _freed: FreeNote,
    /// The number of steps, the bits of the learning rate, and the constants.
    memory: CudaSlice<u64>,
    raw: AdamWSchedule,
}

impl StepSchedule {
    /// Returns a schedule after no step, with a learning rate of 0.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`]; [`Error::Capturing`] while the stream is being captured.
    pub fn new(context: &LayerContext) -> Result<Self> {
        context.expect_not_capturing("allocating memory")?;
        let allocated = context.stream().alloc_zeros::<u64>(4);
        let memory = allocated.map_err(|error| Error::driver("allocating device memory", error))?;
        let at = memory.device_ptr(context.stream()).0;
        let raw = AdamWSchedule { step: at, learning_rate: at + 8, numbers: at + 16 };
        Ok(Self { context: context.clone(), _freed: context.free_note(), memory, raw })
    }

    /// Returns the number of completed steps; synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn steps(&self) -> Result<u64> {
        let failed = |error| Error::driver("reading the number of steps", error);
        let mut found = [0];
        self.context.stream().memcpy_dtoh(&self.memory.slice(..1), &mut found).map_err(failed)?;
        self.context.synchronize()?;
        Ok(found[0])
    }

    /// Sets the learning rate of the next steps; synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        let failed = |error| Error::driver("writing the schedule of steps", error);
        let bits = [learning_rate.to_bits()];
        self.context.stream().memcpy_htod(&bits, &mut self.memory.slice_mut(1..=1)).map_err(failed)?;
        self.context.synchronize()
    }

    /// Launches the copy of the number of completed steps and of the learning rate of the next step. It
    /// waits for nothing: the two numbers are copied from host memory before it returns,
    /// and reach the device in stream order.
    ///
    /// # Errors
    /// [`Error::Driver`]; [`Error::Capturing`] while the stream is being captured, because a graph would repeat the
    /// numbers.
    pub fn set(&mut self, steps: u64, learning_rate: f64) -> Result<()> {
        self.context.expect_not_capturing("setting the schedule of steps")?;
        let numbers = [steps, learning_rate.to_bits()];
        let copied = self.context.stream().memcpy_htod(&numbers, &mut self.memory.slice_mut(..2));
        copied.map_err(|error| Error::driver("writing the schedule of steps", error))
    }

    /// Counts a step, unless the flag `skip` (u32 `[1]`) is not 0, and computes the constants that [`adamw`] reads.
    /// Required once for each step, before the parameters are updated. The learning rate of `settings` is ignored.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::SliceType`], [`Error::OtherDevice`], [`Error::Pointer`] for a flag that does not
    /// fit; [`Error::Driver`].
    pub fn advance(&mut self, settings: AdamWSettings, skip: Option<DeviceSlice<'_>>) -> Result<()> {
        let context = &self.context;
        let skip = skip.map(|skip| skip.at("the flag of skipped steps", context, DataType::I32, 1)).transpose()?;
        let kernels = adamw_kernels(context, DataType::F32)?;
        // SAFETY: the schedule's memory is valid as long as `self` is, the flag has been checked, and the stream is of
        // their device.
        unsafe { kernels.advance_unless(context.raw(), self.raw, settings, skip) }
    }
}

/// The tensors of [`adamw`], for a parameter `[rows, cols]`.
#[derive(Debug)]
pub struct AdamWTensors<'a> {
    /// The dense master weight, f32, aligned to 16 bytes, as are gradient and moments.
    pub weight: DeviceSliceMut<'a>,
    /// A copy of the weight in f16 or bf16 that is written in the same pass.
    pub copy: Option<DeviceSliceMut<'a>>,
    /// The gradient, of f32, f16 or bf16.
    pub gradient: DeviceSlice<'a>,
    /// The first moment, f32.
    pub first: DeviceSliceMut<'a>,
    /// The second moment, f32.
    pub second: DeviceSliceMut<'a>,
    /// An f32 `[1]` that gradients are multiplied by first: [`ClippedGradients::scale`].
    pub gradient_scale: Option<DeviceSlice<'a>>,
    /// A u32 `[1]`: where it is not 0, nothing is written: [`ClippedGradients::non_finite`].
    pub skip: Option<DeviceSlice<'a>>,
}

/// What happens to the second moment in [`adamw_in_phase`].
#[derive(Debug, Default)]
pub enum SecondMoment<'a> {
    /// It follows the gradient.
    #[default]
    Moving,
    /// It follows the gradient, and the sum over elements of the magnitude of its change is written (STEP: Lu et al.,
    /// "Learning N:M Structured Sparsity Masks from Scratch with Precondition", ICML 2023).
    Watched {
        /// An f32 `[1]` for the sum, which is taken in f64 in a fixed order; 0 where the step is skipped.
        changes: DeviceSliceMut<'a>,
        /// Whether changes are summed, or their logarithms (option 2), where zero counts as the least normal f32.
        mean: ChangeMean,
    },
    /// It stays as it was after the step of this number, counted from 1, which also corrects its bias; ε is raised to
    /// the power 3/4 (STEP).
    Frozen {
        /// That step.
        at: u64,
    },
}

/// Decay of the weights that the mask of a sparse layer prunes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PrunedDecay {
    /// `strength · w` is added to the gradient of pruned weights after its scaling and before the moments.
    Gradient {
        /// The factor.
        strength: f32,
    },
    /// `learning_rate · strength · w` is taken off pruned weights, decoupled from the moments. The schedule's learning
    /// rate must not be set between [`StepSchedule::advance`] and the step.
    Weight {
        /// The factor.
        strength: f64,
    },
}

/// What [`adamw_in_phase`] does to second moments and to pruned weights.
#[derive(Debug, Default)]
pub struct AdamWPhase<'a> {
    /// What happens to the second moment.
    pub second_moment: SecondMoment<'a>,
    /// A sparse layer of the parameter's shape, and the decay of the weights that its mask prunes.
    pub pruned_decay: Option<(&'a SparseLinear, PrunedDecay)>,
}

/// Updates a parameter `[rows, cols]` and its moments in place (Loshchilov and Hutter, "Decoupled Weight Decay
/// Regularization", ICLR 2019), with the constants of the schedule's current step, bit for bit as on a CPU.
/// `masked_decay` is a sparse layer of this shape and the factor that the weights which its mask prunes are multiplied
/// by before they are added to their gradient ([`twofour::estimate::masked_decay`]).
///
/// # Errors
/// [`Error::Gradient`] for gradients of another type than f32, f16 and bf16, [`Error::DataType`] for such a copy; those
/// of [`Memory::at`] for a tensor that does not fit; [`Error::Multiple`] where there is masked decay and rows or
/// columns are not multiples of 4; [`Error::TooLarge`]; [`Error::Driver`].
pub fn adamw(
    context: &LayerContext,
    shape: (usize, usize),
    tensors: AdamWTensors<'_>,
    masked_decay: Option<(&SparseLinear, f32)>,
    schedule: &StepSchedule,
    settings: AdamWSettings,
) -> Result<()> {
    let pruned_decay = masked_decay.map(|(layer, strength)| (layer, PrunedDecay::Gradient { strength }));
    let phase = AdamWPhase { second_moment: SecondMoment::Moving, pruned_decay };
    adamw_in_phase(context, shape, tensors, phase, schedule, settings)
}

/// As [`adamw`], with a second moment that is watched or frozen, or decay of pruned weights that does not pass through
/// the moments.
///
/// # Errors
/// Those of [`adamw`], for the tensor of [`SecondMoment::Watched`] too; [`Error::Dimension`] for a second moment that
/// is frozen at step 0; for a watched one those of allocating workspace.
pub fn adamw_in_phase(
    context: &LayerContext,
    (rows, cols): (usize, usize),
    tensors: AdamWTensors<'_>,
    phase: AdamWPhase<'_>,
    schedule: &StepSchedule,
    settings: AdamWSettings,
) -> Result<()> {
    let len = product(rows, cols)?;
    expect_dimension("elements of the parameter, counted from 0,", len + 1, MAX_DIMENSION)?;
    let AdamWPhase { second_moment, pruned_decay } = phase;
    if let Some((layer, _)) = pruned_decay {
        let (what, expected) = ("the sparse layer of the masked decay", (layer.out_features(), layer.in_features()));
        if expected != (rows, cols) {
            return Err(Error::Length { what, expected: len, found: expected.0 * expected.1 });
        }
        if layer.context().ordinal() != context.ordinal() {
            let (expected, found) = (context.ordinal(), layer.context().ordinal());
            return Err(Error::OtherDevice { what, expected, found });
        }
    }
    let (strength, pruned_weight_decay) = match pruned_decay {
        Some((_, PrunedDecay::Gradient { strength })) => (strength, 0.0),
        Some((_, PrunedDecay::Weight { strength })) => (0.0, strength),
        None => (0.0, 0.0),
    };
    let masked_decay = pruned_decay.map(|(layer, _)| MaskedDecay { tiles: layer.mask_tiles(), strength });
    let kernels = adamw_kernels(context, tensors.gradient.dtype())?;
    let (state, gradient_scale, skip) = state_of(context, (rows, cols), &tensors)?;
    let step = AdamWStep { number: StepNumber::Device(schedule.raw), masked_decay, gradient_scale, skip };
    // Held until everything is launched: partial sums are in the workspace.
    let mut work = None;
    let second_moment = match second_moment {
        SecondMoment::Moving => raw::SecondMoment::Moving,
        SecondMoment::Frozen { at } => raw::SecondMoment::Frozen { at },
        SecondMoment::Watched { changes, mean } => {
            let changes = changes.at("the sum of changes", context, DataType::F32, 1)?;
            let [partial] = work.insert(context.work()).parts([AdamW::watched_bytes(len)])?;
            raw::SecondMoment::Watched { changes, partial, mean }
        }
    };
    let phase = raw::AdamWPhase { second_moment, pruned_weight_decay };
    // SAFETY: the slices have been found to be as long as the shape requires, the workspace has room for the partial
    // sums, the schedule's memory is valid as long as it is borrowed, as the mask is, and the stream is of their
    // device.
    unsafe { kernels.step_in_phase(context.raw(), state, settings, step, phase) }
}

/// Checks a parameter's tensors, and returns what its step reads and writes, the scale of the gradient and the flag of
/// skipped steps.
fn state_of(
    context: &LayerContext,
    (rows, cols): (usize, usize),
    tensors: &AdamWTensors<'_>,
) -> Result<(AdamWState, Option<DevicePtr>, Option<DevicePtr>)> {
    let AdamWTensors { weight, copy, gradient, first, second, gradient_scale, skip } = tensors;
    let (f32, len) = (DataType::F32, product(rows, cols)?);
    let copied = |copy: &DeviceSliceMut<'_>| -> Result<AdamWCopy> {
        let dtype = copy.dtype();
        Ok(AdamWCopy { address: copy.at("the copy of the weight", context, dtype, len)?, dtype })
    };
    let state = AdamWState {
        weight: weight.at("the weight", context, f32, len)?,
        gradient: gradient.at("the gradient", context, gradient.dtype(), len)?,
        first: first.at("the first moment", context, f32, len)?,
        second: second.at("the second moment", context, f32, len)?,
        copy: copy.as_ref().map(copied).transpose()?,
        rows,
        cols,
    };
    let scale = gradient_scale.as_ref().map(|scale| scale.at("the scale of the gradient", context, f32, 1));
    let skip = skip.as_ref().map(|skip| skip.at("the flag of skipped steps", context, DataType::I32, 1));
    Ok((state, scale.transpose()?, skip.transpose()?))
}

/// Updates several parameters and their moments as [`adamw`] does without a mask, 64 in a launch: for the many vectors
/// of a model, whose launches take longer than their bytes. The gradients have one type, and all have the first one's
/// scale and flag.
///
/// # Errors
/// Those of [`adamw`].
pub fn adamw_together(
    context: &LayerContext,
    parameters: &[AdamWTensors<'_>],
    schedule: &StepSchedule,
    settings: AdamWSettings,
) -> Result<()> {
    let Some(first) = parameters.first() else { return Ok(()) };
    let dtype = first.gradient.dtype();
    let kernels = adamw_kernels(context, DataType::F32)?;
    let mut states = Vec::with_capacity(parameters.len());
    let (mut gradient_scale, mut skip) = (None, None);
    for (index, tensors) in parameters.iter().enumerate() {
        let len = tensors.weight.len();
        expect_dimension("elements of the parameter, counted from 0,", len + 1, MAX_DIMENSION)?;
        if tensors.gradient.dtype() != dtype {
            let found = tensors.gradient.dtype();
            return Err(Error::SliceType { what: "the gradients of one launch", expected: dtype, found });
        }
        let (state, own_scale, own_skip) = state_of(context, (1, len), tensors)?;
        if index == 0 {
            (gradient_scale, skip) = (own_scale, own_skip);
        }
        states.push(state);
    }
    let step = AdamWStep { number: StepNumber::Device(schedule.raw), masked_decay: None, gradient_scale, skip };
    // SAFETY: the slices have been found to have one length for each parameter, the schedule's memory is valid as long
    // as it is borrowed, and the stream is of their device.
    unsafe { kernels.step_together(context.raw(), &states, settings, step) }
}
