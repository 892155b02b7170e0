//! The end of a training step.

use std::fmt::{Debug, Display};

use super::{LayerOperations, LayerRefresh, OptimizerStep, ParameterState, StepFindings, StepLimits, StepPhase};
use crate::{Error, Result};

/// What a training step does after its gradients: it judges them, updates parameters, and selects masks anew; and how a
/// step is repeated.
pub trait StepOperations: LayerOperations {
    /// What decides about a step's update, in the engine's memory: whether loss and gradients are finite, and what
    /// gradients are multiplied by.
    type StepGuard: Debug + Send;

    /// The guard of a training loop, with room for the flips of that many 2:4 layers.
    ///
    /// # Errors
    /// Not enough memory.
    fn step_guard(&self, layers: usize) -> Result<Self::StepGuard>;

    /// Computes the norm of gradients, all of [`Kind::Wide`](super::Kind::Wide), and the factor that removes their loss
    /// scale and clips the norm, and takes note of the loss, [`Kind::Wide`](super::Kind::Wide) of one element. Where
    /// the norm or the loss is not finite, the calls that take the guard change nothing until it judges again.
    ///
    /// # Errors
    /// Another kind.
    fn judge(
        &self,
        gradients: &[&Self::Buffer],
        loss: &Self::Buffer,
        limits: StepLimits,
        guard: &mut Self::StepGuard,
    ) -> Result<()>;

    /// What the guard found, and the flips of layers: at most as many as the guard has room for. Waits.
    ///
    /// # Errors
    /// More layers; those of the device.
    fn findings(&self, guard: &mut Self::StepGuard, layers: &[&Self::SparseLinear]) -> Result<StepFindings>;

    /// [`SparseLayer::remask`](super::SparseLayer::remask) of layers that select their masks, and
    /// [`SparseLayer::repack`](super::SparseLayer::repack) of the others; nothing where the guard skips the step. One
    /// layer may leave a device idle at its end: an engine may refresh several at once, with the same bits.
    ///
    /// # Errors
    /// [`Error::InLayer`](crate::Error::InLayer) with those of [`SparseLayer::remask`](super::SparseLayer::remask).
    fn refresh(
        &self,
        layers: Vec<LayerRefresh<'_, Self::Buffer, Self::SparseLinear>>,
        guard: &Self::StepGuard,
    ) -> Result<()>;

    /// The root of the sum of the squares of all elements of [`Kind::Wide`](super::Kind::Wide) buffers: NaN or infinite
    /// where an element is. Waits.
    ///
    /// # Errors
    /// Another kind.
    fn gradient_norm(&self, gradients: &[&Self::Buffer]) -> Result<f64>;

    /// An optimizer's step of parameters, with the same numbers for all; the bits are the same on all engines, and
    /// those of a call for each. Returns the sum of the magnitudes of the second moments' changes, or of their
    /// logarithms, where [`SecondMoment::Watched`](super::SecondMoment::Watched) or
    /// [`SecondMoment::WatchedByLogarithm`](super::SecondMoment::WatchedByLogarithm) asks for it (and then waits), and
    /// otherwise 0; engines take that sum in orders of their own. With a guard, gradients are multiplied by the guard's
    /// factor, `gradient_scale` must be 1, and a skipped step changes nothing and returns 0.
    ///
    /// # Errors
    /// Operands that do not fit; AdamW without a second moment; what the engine does not support.
    fn step(
        &self,
        step: &OptimizerStep,
        parameters: Vec<ParameterState<'_, Self::Buffer, Self::SparseLinear>>,
        guard: Option<&Self::StepGuard>,
    ) -> Result<f64>;

    /// Runs `work`, or repeats what it launched at an earlier call with the same key: the same calls with the same
    /// numbers on the same memory, but for learning rate and number, counted from 1, of an `update`: the
    /// [`StepOperations::step`] calls have those at each repetition, whatever they were given when they were captured.
    /// `work` changes nothing but the engine's memory, and neither waits nor writes from host memory. It may run twice
    /// in a call, the first time without effect.
    ///
    /// # Errors
    /// Those of `work`, and of the device.
    fn repeat<X: From<Error> + Display>(
        &self,
        _key: u64,
        _update: Option<(f64, u64)>,
        mut work: impl FnMut() -> Result<(), X>,
    ) -> Result<(), X> {
        work()
    }

    /// What a person should know about how the engine works, such as why it repeats no steps: each message once.
    fn take_note(&self) -> Option<String> {
        None
    }

    /// Says which phase of a step begins. Engines that measure phases take note of it.
    ///
    /// # Errors
    /// Those of the device.
    fn begin_phase(&self, _: StepPhase) -> Result<()> {
        Ok(())
    }
}
