//! Sums of gradients over ranks, as the trainer requires them.

use std::{fmt::Debug, sync::Arc};

use super::Rank;
use crate::{Result, engine::Engine};

/// Sums the gradients of all ranks while the backward pass of a step runs.
///
/// In each step [`GradientReduction::ready`] is called for the same buffers in the same order on every rank, as the
/// backward pass completes them, and then [`GradientReduction::finish`] once. All buffers hold sums for operations
/// after it, with the same bits on every rank, whichever rank comes first.
pub trait GradientReduction<E: Engine>: Debug + Send {
    /// Begins the sums of gradients that are complete on this rank. Nothing touches them before
    /// [`GradientReduction::finish`].
    ///
    /// # Errors
    /// A rank that has failed; those of the device.
    fn ready(&mut self, rank: &Rank, gradients: Vec<&mut E::Buffer>) -> Result<()>;

    /// Sums the losses, and makes the engine's later operations wait for all sums of the step.
    ///
    /// # Errors
    /// A rank that has failed; those of the device.
    fn finish(&mut self, rank: &Rank, loss: &mut E::Buffer) -> Result<()>;

    /// Says, in place of the remaining calls of [`GradientReduction::ready`], that this rank's gradients are not
    /// finite. The loss is then NaN on all ranks after [`GradientReduction::finish`].
    ///
    /// # Errors
    /// An engine whose gradients are never refused; a rank that has failed.
    fn refuse(&mut self, rank: &Rank) -> Result<()>;

    /// What another thread calls when a rank has failed, so that this one does not wait for it on the device.
    fn abort_handle(&self) -> Option<Box<dyn Fn() + Send + Sync>> {
        None
    }

    /// The threads that this rank computes with, where it must not share them with other ranks.
    fn threads(&self) -> Option<Arc<rayon::ThreadPool>> {
        None
    }
}
