//! Random numbers for weights and activations.

/// Numbers without a pattern, the same at every run (xorshift64*, Vigna 2016).
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The one sequence.
    pub(crate) fn new() -> Self {
        Random(0x2545_F491_4F6C_DD1D)
    }

    /// Sixty-four bits; the upper ones are the better ones.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number from -1 to 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
