//! Working memory that outlives a product, so that the next one need not ask the operating system for pages again (measured:
//! a tenth of the time of a product with 512 tokens).

use std::{
    ops::{Deref, DerefMut},
    sync::{Mutex, PoisonError},
};

use super::aligned::Aligned;

/// Buffers that are kept at most: two for each of two threads that multiply at the same time.
const KEPT: usize = 4;

static FREE: Mutex<Vec<Aligned<f32>>> = Mutex::new(Vec::new());

/// Borrowed working memory; dropped, it is kept for the next.
#[derive(Debug)]
pub(super) struct Scratch {
    buffer: Aligned<f32>,
    len: usize,
}

impl Scratch {
    /// `len` elements of whatever contents.
    pub(super) fn take(len: usize) -> Self {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = (0..free.len()).filter(|&i| free[i].len() >= len).min_by_key(|&i| free[i].len());
        // Where none fits, the smallest makes way.
        let taken = fitting.or_else(|| (0..free.len()).min_by_key(|&i| free[i].len())).map(|i| free.swap_remove(i));
        drop(free);
        let buffer = match taken {
            Some(buffer) if buffer.len() >= len => buffer,
            _ => Aligned::zeroed(len),
        };
        Self { buffer, len }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < KEPT {
            free.push(std::mem::replace(&mut self.buffer, Aligned::zeroed(0)));
        }
    }
}

impl Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.buffer[..self.len]
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.buffer[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_as_long_as_asked_whatever_was_kept() {
        for len in [10, 1000, 0, 100, 5000, 1] {
            let mut scratch = Scratch::take(len);
            let other = Scratch::take(len);
            scratch.fill(f32::NAN);
            assert_eq!((scratch.len(), other.len()), (len, len));
        }
        assert!(FREE.lock().unwrap().len() <= KEPT);
    }
}
