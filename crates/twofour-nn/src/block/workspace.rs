//! Reusing an engine's buffers from step to step.

use std::collections::HashMap;

use crate::{
    Result,
    engine::{Buffer as _, Engine, Kind},
};

/// A pool of buffers and packed activations. Fresh memory costs time, a training step takes the same memory again, and
/// a step that is repeated must ([`StepOperations::repeat`](crate::engine::StepOperations::repeat)).
#[derive(Debug)]
pub struct Workspace<E: Engine> {
    free: HashMap<(Kind, usize), Vec<E::Buffer>>,
    /// By tokens and features.
    packed: HashMap<(usize, usize), Vec<E::PackedActivation>>,
}

impl<E: Engine> Default for Workspace<E> {
    fn default() -> Self {
        Workspace { free: HashMap::new(), packed: HashMap::new() }
    }
}

impl<E: Engine> Workspace<E> {
    /// A buffer of unspecified content.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn take(&mut self, engine: &E, kind: Kind, len: usize) -> Result<E::Buffer> {
        match self.free.get_mut(&(kind, len)).and_then(Vec::pop) {
            Some(buffer) => Ok(buffer),
            None => Ok(engine.zeros(kind, len)?),
        }
    }

    /// A [`Kind::Compute`] buffer of unspecified content.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn compute(&mut self, engine: &E, len: usize) -> Result<E::Buffer> {
        self.take(engine, Kind::Compute, len)
    }

    /// A packed activation of `(tokens, features)` that was given back, for
    /// [`LinearOperations::pack_squared_relu`](crate::engine::LinearOperations::pack_squared_relu).
    pub fn packed(&mut self, shape: (usize, usize)) -> Option<E::PackedActivation> {
        self.packed.get_mut(&shape)?.pop()
    }

    /// Takes a packed activation of `(tokens, features)` back.
    pub fn give_packed(&mut self, shape: (usize, usize), packed: E::PackedActivation) {
        self.packed.entry(shape).or_default().push(packed);
    }

    /// Frees everything: where layers change what they compute with, steps take other memory from then on.
    pub fn clear(&mut self) {
        self.free.clear();
        self.packed.clear();
    }

    /// Takes buffers back.
    pub fn give(&mut self, buffers: impl IntoIterator<Item = E::Buffer>) {
        for buffer in buffers {
            self.free.entry((buffer.kind(), buffer.len())).or_default().push(buffer);
        }
    }
}
