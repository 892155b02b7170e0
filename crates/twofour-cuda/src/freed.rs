//! The count of freed device memory, by which a captured graph is known to be stale.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How often memory of a device was freed: a graph that was captured before may use it.
#[derive(Debug, Clone, Default)]
pub(crate) struct FreeCount(Arc<Mutex<u64>>);

impl FreeCount {
    /// Returns the count, which does not change while it is held.
    pub(crate) fn lock(&self) -> MutexGuard<'_, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a note that counts when it is dropped. An owner of memory holds it before the memory, so that the count
    /// is raised before the memory is freed.
    pub(crate) fn note(&self) -> FreeNote {
        FreeNote(self.clone())
    }
}

/// Raises the count of freed memory when it is dropped.
#[derive(Debug)]
pub struct FreeNote(FreeCount);

impl Drop for FreeNote {
    fn drop(&mut self) {
        *self.0.lock() += 1;
    }
}
