//! Cross-entropy, alone or with the divergence from a teacher.

use twofour_cuda::{
    DataType, DevicePtr, Result,
    arguments::{Memory, at_if, positive, product, side},
    layer::{Accumulate, DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::{
    DistillationWeights,
    cuda::raw::cross_entropy::{CrossEntropy, CrossEntropyParameters},
};

/// The target of a row that has neither loss nor gradient.
pub const IGNORED_TARGET: u32 = u32::MAX;

/// What the gradient of a loss is multiplied by: `host`, and a number in device memory where there is one.
#[derive(Debug, Clone, Copy)]
pub struct LossFactor<'a> {
    /// Such as the reciprocal of the number of targets.
    pub host: f32,
    /// An f32 `[1]`, such as the loss scale.
    pub device: Option<DeviceSlice<'a>>,
}

/// The destination of a loss.
struct LossTarget<'a> {
    loss: DeviceSliceMut<'a>,
    accumulate: Accumulate,
    status: DeviceSliceMut<'a>,
}

/// Computes the cross-entropy `log Σ exp(logits) - logits[target]` of the rows of `[rows, classes]` logits, adds it up,
/// and replaces the logits by their gradient `(softmax(logits) - onehot(target)) · factor`.
///
/// `targets` are u32 `[rows]`; [`IGNORED_TARGET`] is no loss and no gradient. `loss` is an f32 `[1]`: the sum of the
/// losses, not multiplied by the factor, and added to what is there for [`Accumulate::Add`]. `status` is a u32 `[1]`:
/// it becomes the number of a row whose target is no class, counted from 1, unless it was larger; such a row is
/// ignored. The caller sets it to 0 before.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for logits of another type than f32, f16 and bf16; those of
/// [`Memory::at`] for a tensor that does not fit; [`Error::Dimension`](twofour_cuda::Error::Dimension) for no classes;
/// those of allocating workspace; [`Error::Driver`](twofour_cuda::Error::Driver).
#[expect(clippy::too_many_arguments, reason = "each is a tensor of its own")]
pub fn cross_entropy(
    context: &LayerContext,
    (rows, classes): (usize, usize),
    logits: DeviceSliceMut<'_>,
    targets: DeviceSlice<'_>,
    factor: LossFactor<'_>,
    loss: DeviceSliceMut<'_>,
    accumulate: Accumulate,
    status: DeviceSliceMut<'_>,
) -> Result<()> {
    let at = logits.at("the logits", context, logits.dtype(), product(rows, classes)?)?;
    let target = LossTarget { loss, accumulate, status };
    run(context, (rows, classes), (at, logits.dtype()), (targets, None), Some(factor), target)
}

/// Computes the losses of a student with these logits over the rows, adds them up, and replaces the logits by their
/// gradient: [`cross_entropy`] with the divergence from the probabilities of `teacher`, `[rows, classes]` of the type
/// of the logits. Ignored targets have no divergence either.
///
/// # Errors
/// Those of [`cross_entropy`].
#[expect(clippy::too_many_arguments, reason = "each is a tensor of its own")]
pub fn distillation(
    context: &LayerContext,
    weights: DistillationWeights,
    (rows, classes): (usize, usize),
    (logits, teacher): (DeviceSliceMut<'_>, DeviceSlice<'_>),
    targets: DeviceSlice<'_>,
    factor: LossFactor<'_>,
    loss: DeviceSliceMut<'_>,
    accumulate: Accumulate,
    status: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (logits.dtype(), product(rows, classes)?);
    let at = logits.at("the logits", context, dtype, len)?;
    let teacher = teacher.at("the teacher's logits", context, dtype, len)?;
    let target = LossTarget { loss, accumulate, status };
    run(context, (rows, classes), (at, dtype), (targets, Some((teacher, weights))), Some(factor), target)
}

/// Computes the sum of the losses of [`cross_entropy`] and leaves the logits as they are.
///
/// # Errors
/// Those of [`cross_entropy`].
pub fn cross_entropy_loss(
    context: &LayerContext,
    (rows, classes): (usize, usize),
    logits: DeviceSlice<'_>,
    targets: DeviceSlice<'_>,
    loss: DeviceSliceMut<'_>,
    accumulate: Accumulate,
    status: DeviceSliceMut<'_>,
) -> Result<()> {
    let at = logits.at("the logits", context, logits.dtype(), product(rows, classes)?)?;
    let target = LossTarget { loss, accumulate, status };
    run(context, (rows, classes), (at, logits.dtype()), (targets, None), None, target)
}

fn run(
    context: &LayerContext,
    (rows, classes): (usize, usize),
    (logits, dtype): (DevicePtr, DataType),
    (targets, teacher): (DeviceSlice<'_>, Option<(DevicePtr, DistillationWeights)>),
    factor: Option<LossFactor<'_>>,
    to: LossTarget<'_>,
) -> Result<()> {
    let kernels = CrossEntropy::of(context, dtype)?;
    let weights = teacher.map_or(DistillationWeights { divergence: 0.0, cross_entropy: 1.0 }, |(_, weights)| weights);
    let device_factor = factor.and_then(|factor| factor.device);
    let mut parameters = CrossEntropyParameters {
        logits,
        teacher: teacher.map_or(0, |(at, _)| at),
        targets: targets.at("the targets", context, DataType::I32, rows)?,
        device_factor: at_if(device_factor.as_ref(), "the factor of the gradient", context, DataType::F32, 1)?,
        losses: 0,
        loss: to.loss.at("the loss", context, DataType::F32, 1)?,
        status: to.status.at("the status", context, DataType::I32, 1)?,
        rows: side("rows of logits", rows)?,
        classes: positive("classes", classes)?,
        factor: factor.map_or(0.0, |factor| factor.host),
        divergence: weights.divergence,
        cross_entropy: weights.cross_entropy,
        writes_gradient: u32::from(factor.is_some()),
        adds_loss: u32::from(to.accumulate == Accumulate::Add),
    };
    let mut work = context.work();
    [parameters.losses] = work.parts([4 * rows])?;
    // SAFETY: the slices have been found to be as long as the shape requires, the workspace has room for the rows'
    // losses, and the stream is of their device.
    unsafe { kernels.run(context.raw(), &parameters) }
}
