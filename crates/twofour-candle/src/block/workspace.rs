//! Reusing work buffers from step to step.

use std::{
    collections::HashMap,
    fmt,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// A pool of f32 buffers. Fresh memory costs a page fault for every 4 KiB; a training step takes the same buffers again.
#[derive(Clone, Default)]
pub(crate) struct Workspace {
    free: Arc<Mutex<HashMap<usize, Vec<Vec<f32>>>>>,
}

impl Workspace {
    /// A buffer of `len` elements of unspecified, initialised content. It goes back to the pool when dropped.
    pub(crate) fn take(&self, len: usize) -> Buffer {
        let data = self.lock().get_mut(&len).and_then(Vec::pop).unwrap_or_else(|| vec![0f32; len]);
        Buffer { data, home: self.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Vec<Vec<f32>>>> {
        // The map is whole at every moment, even if a thread panicked while holding the lock.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free: usize = self.lock().iter().map(|(len, buffers)| len * buffers.len()).sum();
        f.debug_struct("Workspace").field("free_elements", &free).finish()
    }
}

/// A buffer of a [`Workspace`].
pub(crate) struct Buffer {
    data: Vec<f32>,
    home: Workspace,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        self.home.lock().entry(data.len()).or_default().push(data);
    }
}

impl Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.data
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.data
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.data.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffer_is_taken_again() {
        let workspace = Workspace::default();
        let first = workspace.take(100);
        let address = first.as_ptr();
        drop(first);
        assert_ne!(workspace.take(50).as_ptr(), address);
        let again = workspace.take(100);
        assert_eq!((again.as_ptr(), again.len()), (address, 100));
        assert_ne!(workspace.take(100).as_ptr(), address);
    }
}
