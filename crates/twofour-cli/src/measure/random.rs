//! Random numbers for weights, activations and the order of contenders.

/// A pseudo-random number generator with a fixed seed (xorshift64*, Vigna 2016).
#[derive(Debug)]
pub struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Random::new()
    }
}

impl Random {
    /// Returns the generator at the start of its one sequence.
    pub fn new() -> Self {
        Random(0x2545_F491_4F6C_DD1D)
    }

    /// Returns 64 bits; the upper ones are the better ones.
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Returns a number from -1 to 1.
    pub fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Returns an integer below `bound`. For bounds far below 2^32 the bias of the remainder is negligible.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() >> 32) as usize % bound
    }

    /// Shuffles `items` (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_of_three_comes_up_about_as_often() {
        let mut random = Random::new();
        let mut counts = std::collections::BTreeMap::new();
        let mut items = [0, 1, 2];
        for _ in 0..6000 {
            random.shuffle(&mut items);
            *counts.entry(items).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|count| (900..1100).contains(count)), "{counts:?}");
    }
}
