//! Memory of an engine.

use std::fmt::Debug;

#[cfg(doc)]
use super::Engine;

/// What the elements of a buffer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// f32: master weights, gradients of parameters, moments, statistics, losses.
    Wide,
    /// The engine's compute type ([`Memory::compute_type`](super::Memory::compute_type)): activations, their gradients,
    /// and copies of parameters for GEMMs.
    Compute,
    /// u32: tokens.
    Index,
}

/// Memory of an engine.
pub trait Buffer: Debug + Send {
    /// Number of elements.
    fn len(&self) -> usize;

    /// What they are.
    fn kind(&self) -> Kind;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
