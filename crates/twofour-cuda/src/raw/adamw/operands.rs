//! What a step of the optimizer reads and writes.

use twofour::adamw_step::ChangeMean;

use crate::{DataType, DevicePtr};

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
    /// 16 bytes for [`AdamW::advance`](super::AdamW::advance) to write and [`AdamW::step`](super::AdamW::step) to read,
    /// aligned to 16.
    pub numbers: DevicePtr,
}

/// The source of a step's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepNumber {
    /// This number, counted from 1, with the learning rate of the [`AdamWSettings`].
    Host(u64),
    /// The number and learning rate of the last [`AdamW::advance`](super::AdamW::advance).
    Device(AdamWSchedule),
}

/// A step of the optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// The step's number.
    pub number: StepNumber,
    /// Masked decay.
    pub masked_decay: Option<MaskedDecay>,
    /// An f32 that gradients are multiplied by first: for clipping, or to undo loss scaling. It does not scale masked
    /// decay.
    pub gradient_scale: Option<DevicePtr>,
    /// A u32: where it is not 0 when the kernel runs, the step writes nothing. For steps whose gradients are not
    /// finite.
    pub skip: Option<DevicePtr>,
}

/// What happens to the second moment in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SecondMoment {
    /// It follows the gradient.
    #[default]
    Moving,
    /// It follows the gradient, and the sum over elements of the magnitude of its change is written (STEP: Lu et al.,
    /// "Learning N:M Structured Sparsity Masks from Scratch with Precondition", ICML 2023).
    Watched {
        /// An f32 for the sum, which is taken in f64 in a fixed order; 0 where the step is skipped.
        changes: DevicePtr,
        /// Memory for partial sums, [`AdamW::watched_bytes`](super::AdamW::watched_bytes), aligned to 8.
        partial: DevicePtr,
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

/// What [`AdamW::step_in_phase`](super::AdamW::step_in_phase) does beside what [`AdamWStep`] says.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct AdamWPhase {
    /// What happens to the second moment.
    pub second_moment: SecondMoment,
    /// Added to the weight decay of the elements that the mask of [`AdamWStep::masked_decay`] prunes; it is multiplied
    /// by the learning rate, which must not change in device memory between [`AdamW::advance`](super::AdamW::advance)
    /// and the step. Nothing where there is no mask.
    pub pruned_weight_decay: f64,
}
