//! The side store for gradients of parameters that live inside block operators.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::{Result, Tensor, TensorId, backprop::GradStore};

use super::workspace::Workspace;

/// Collects the gradients of block parameters during a backward pass, and keeps the blocks' work buffers.
///
/// candle's custom operators have at most three tensor inputs, and its tape pays a zero-fill and an addition for every
/// gradient it delivers. A block operator therefore holds its parameters itself and leaves their gradients here.
/// [`Gradients::backward`] runs the pass and returns everything in one [`GradStore`].
///
/// A clone shares the store. Use one `Gradients` per model and do not run two backward passes through it at a time.
#[derive(Debug, Clone, Default)]
pub struct Gradients {
    store: Arc<Mutex<HashMap<TensorId, Tensor>>>,
    workspace: Workspace,
}

impl Gradients {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs the backward pass from `loss` and returns the gradients of every variable it depends on, on the tape or inside
    /// a block operator that was given this store.
    ///
    /// # Errors
    /// Those of candle's backward pass.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        // Left-overs of a pass that failed half-way must not leak into this one.
        self.lock().clear();
        let mut grads = loss.backward()?;
        for (id, gradient) in self.lock().drain() {
            let total = match grads.get_id(id) {
                Some(on_tape) => on_tape.add(&gradient)?.detach(),
                None => gradient,
            };
            grads.insert_id(id, total);
        }
        Ok(grads)
    }

    /// Adds a parameter's gradient.
    pub(crate) fn add(&self, parameter: TensorId, gradient: Tensor) -> Result<()> {
        let mut store = self.lock();
        let total = match store.get(&parameter) {
            Some(so_far) => so_far.add(&gradient)?,
            None => gradient,
        };
        store.insert(parameter, total);
        Ok(())
    }

    pub(crate) fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TensorId, Tensor>> {
        // Only whole entries are ever inserted, so the map is usable whatever happened to the thread that held it.
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
