//! Keeping weights out of the caches: calls rotate through copies.

use std::{cell::Cell, mem};

use super::machine;

/// The assumed size of a last-level cache of unknown size.
const ASSUMED_CACHE: usize = 64 << 20;

/// The least memory that calls rotate through. A cache whose replacement policy keeps a part of a stream then keeps
/// only a small part.
const LEAST: usize = 256 << 20;

/// From this size on, a last-level cache may be one of several, or shared with neighbours, so that at times more of it
/// is available than the operating system reports. Calls then rotate through at least [`MIN_BESIDE_LARGE_CACHE`].
const LARGE_CACHE: usize = 200 << 20;
const MIN_BESIDE_LARGE_CACHE: usize = 700 << 20;

/// The most memory of one contender's copies. Three contenders have their own copies, and the read probe a buffer:
/// about 4 GiB together.
const MOST: usize = 1100 << 20;

/// Memory that the allocator and the fields around the values take for a copy, beside the copy's struct.
const OVERHEAD: usize = 512;

/// The most copies: each costs time to make, however small it is. All copies of a weight of less than a few KiB fit a
/// large cache then.
const MAX_COPIES: usize = 1 << 16;

/// Returns the bytes that must be read before a copy is used again, so that no cache still holds it: twice the
/// last-level cache or more.
pub(crate) fn rotation_bytes() -> usize {
    let cache = machine::last_level_cache().map_or(ASSUMED_CACHE, |bytes| bytes as usize);
    let least = if cache >= LARGE_CACHE { MIN_BESIDE_LARGE_CACHE } else { LEAST };
    (2 * cache).max(least).min(MOST)
}

/// A weight and enough copies of it that none is in a cache when it is used.
#[derive(Debug)]
pub(crate) struct Rotation<W> {
    copies: Vec<W>,
    turn: Cell<usize>,
}

/// The number of copies of a weight of `bytes` bytes in a struct of some more.
fn copies_of(bytes: usize, of_struct: usize) -> usize {
    let bytes = bytes.max(mem::size_of::<usize>());
    let charged = bytes.saturating_add(of_struct + OVERHEAD);
    // One more than fits: before a copy is used again, all of the others have been read.
    (rotation_bytes().div_ceil(bytes) + 1).min(MOST / charged).clamp(1, MAX_COPIES)
}

impl<W> Rotation<W> {
    /// Returns copies of a weight of `bytes` bytes; `copy` must copy its memory.
    pub(crate) fn new(weight: W, bytes: usize, copy: impl Fn(&W) -> W) -> Self {
        let count = copies_of(bytes, mem::size_of::<W>());
        let mut copies = Vec::with_capacity(count);
        copies.push(weight);
        while copies.len() < count {
            copies.push(copy(&copies[0]));
        }
        Rotation { copies, turn: Cell::new(0) }
    }

    /// Returns the next copy.
    pub(crate) fn next(&self) -> &W {
        let turn = self.turn.get();
        self.turn.set((turn + 1) % self.copies.len());
        &self.copies[turn]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_take_turns_and_outgrow_the_cache() {
        let bytes = 64 << 20;
        let rotation = Rotation::new(0, bytes, |first| first + 1);
        let count = rotation.copies.len();
        assert!((count - 1) * bytes >= rotation_bytes() || (count + 1) * bytes > MOST, "{count}");
        let first = rotation.next() as *const i32;
        (1..count).for_each(|_| assert_ne!(rotation.next() as *const i32, first));
        assert_eq!(rotation.next() as *const i32, first);
    }

    #[test]
    fn copies_of_a_tiny_weight_are_bounded() {
        assert_eq!(copies_of(2, 8), MAX_COPIES);
        // What a copy takes beside its bytes counts, too.
        let count = copies_of(2, 1 << 20);
        assert!(count > 1 && count << 20 <= MOST, "{count}");
        assert_eq!(copies_of(2 * MOST, 8), 1);
    }
}
