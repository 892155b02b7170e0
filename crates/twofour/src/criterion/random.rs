//! Random scores: the baseline that every criterion must beat.

use super::{Criterion, Scorer, Weight};
use crate::{Result, random};

/// Scores an element by a number from a counter-based generator (Philox), keyed by the seed and the element's place:
/// the same on every machine and with any number of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Random {
    /// What the numbers depend on, with an element's place.
    pub seed: u64,
}

impl Criterion for Random {
    fn scorer<'a>(&'a self, _weight: &Weight<'a>) -> Result<Scorer<'a>> {
        Ok(Box::new(|row, _, scores| {
            for (block, scores) in scores.chunks_mut(4).enumerate() {
                // Places beyond 2³² repeat; a row of that length has no mask that fits memory.
                let numbers = random::four(self.seed, row as u32, block as u32);
                scores.copy_from_slice(&numbers[..scores.len()]);
            }
        }))
    }
}
