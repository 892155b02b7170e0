//! Keeping weights out of the caches: copies take turns.

use std::{cell::Cell, mem};

use super::machine;

/// Where the cache's size is unknown, it is taken for this.
const ASSUMED_CACHE: usize = 64 << 20;

/// What is read in turns is at least this, so that a cache with a clever replacement, which keeps a part of what passes through, keeps a
/// small part.
const LEAST: usize = 256 << 20;

/// From this size on, a last-level cache may be one of several, or shared with neighbours that leave more of it at times than the
/// operating system tells: then at least [`LEAST_BESIDE_LARGE_CACHE`].
const LARGE_CACHE: usize = 200 << 20;
const LEAST_BESIDE_LARGE_CACHE: usize = 700 << 20;

/// The most memory that the copies for one contender take. Three contenders have copies of their own, and the read probe a buffer:
/// about 4 GiB together.
const MOST: usize = 1100 << 20;

/// Bytes that must be read before a weight's turn comes again, so that no cache still holds it: twice the last-level cache or more.
pub(crate) fn rotation_bytes() -> usize {
    let cache = machine::last_level_cache().map_or(ASSUMED_CACHE, |bytes| bytes as usize);
    let least = if cache >= LARGE_CACHE { LEAST_BESIDE_LARGE_CACHE } else { LEAST };
    (2 * cache).max(least).min(MOST)
}

/// A weight and as many copies of it as it takes that none is in a cache when its turn comes.
#[derive(Debug)]
pub(crate) struct Rotation<W> {
    copies: Vec<W>,
    turn: Cell<usize>,
}

impl<W> Rotation<W> {
    /// Copies of a weight of `bytes` bytes; `copy` must copy its memory.
    pub(crate) fn new(weight: W, bytes: usize, copy: impl Fn(&W) -> W) -> Self {
        let bytes = bytes.max(mem::size_of::<usize>());
        // One more than fits: at a weight's turn, all of the others have been read since.
        let count = (rotation_bytes().div_ceil(bytes) + 1).min(MOST / bytes).max(1);
        let mut copies = Vec::with_capacity(count);
        copies.push(weight);
        while copies.len() < count {
            copies.push(copy(&copies[0]));
        }
        Rotation { copies, turn: Cell::new(0) }
    }

    /// The copy whose turn it is.
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
}
