//! Memory that is asked for while something else is multiplied.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// f32 values of a cache line.
const LINE: usize = 64 / size_of::<f32>();

/// The panel that is multiplied next, asked for part by part: its lines are then read in no order that hardware foresees.
#[derive(Debug)]
pub(super) struct Ahead<'a>(std::slice::Chunks<'a, f32>);

impl<'a> Ahead<'a> {
    /// All of `panel` in so many parts.
    pub(super) fn new(panel: &'a [f32], parts: usize) -> Self {
        Self(panel.chunks(panel.len().div_ceil(parts.max(1)).next_multiple_of(LINE).max(LINE)))
    }

    /// Asks for the next part.
    #[inline(always)]
    pub(super) fn fetch(&mut self) {
        if let Some(part) = self.0.next() {
            fetch(part);
        }
    }
}

/// Asks for memory, into the second cache.
#[inline(always)]
pub(super) fn fetch<T>(memory: &[T]) {
    for line in memory.chunks(64 / size_of::<T>()) {
        // SAFETY: x86-64 has SSE; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
}
