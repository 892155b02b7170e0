//! Reusing an engine's buffers from step to step.

use std::collections::HashMap;

use crate::{
    Result,
    engine::{Buffer as _, Engine, Kind},
};

/// A pool of buffers. Fresh memory costs time, and a training step takes the same buffers again.
#[derive(Debug)]
pub struct Workspace<E: Engine> {
    free: HashMap<(Kind, usize), Vec<E::Buffer>>,
}

impl<E: Engine> Default for Workspace<E> {
    fn default() -> Self {
        Workspace { free: HashMap::new() }
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
            None => engine.zeros(kind, len),
        }
    }

    /// A [`Kind::Compute`] buffer of unspecified content.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn compute(&mut self, engine: &E, len: usize) -> Result<E::Buffer> {
        self.take(engine, Kind::Compute, len)
    }

    /// Takes buffers back.
    pub fn give(&mut self, buffers: impl IntoIterator<Item = E::Buffer>) {
        for buffer in buffers {
            self.free.entry((buffer.kind(), buffer.len())).or_default().push(buffer);
        }
    }
}
