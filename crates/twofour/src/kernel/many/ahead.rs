//! Memory that is asked for while something else is multiplied.

use crate::kernel::{aligned::CACHE_LINE, vector::Vector};

/// f32 values of a cache line.
const LINE: usize = CACHE_LINE / size_of::<f32>();

/// The panel that is multiplied next, asked for part by part: its lines are then read in no order that hardware
/// foresees.
#[derive(Debug)]
pub(super) struct Ahead<'a>(std::slice::Chunks<'a, f32>);

impl<'a> Ahead<'a> {
    /// All of `panel` in so many parts.
    pub(super) fn new(panel: &'a [f32], parts: usize) -> Self {
        Self(panel.chunks(panel.len().div_ceil(parts.max(1)).next_multiple_of(LINE).max(LINE)))
    }

    /// Asks for the next part.
    #[inline(always)]
    pub(super) fn fetch<V: Vector>(&mut self) {
        if let Some(part) = self.0.next() {
            fetch::<V, _>(part);
        }
    }
}

/// Asks for memory, into the second cache.
#[inline(always)]
pub(super) fn fetch<V: Vector, T>(memory: &[T]) {
    for line in memory.chunks(CACHE_LINE / size_of::<T>()) {
        V::prefetch_second(line.as_ptr().cast());
    }
}
