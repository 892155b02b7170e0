//! Counter-based random numbers: the n-th number of a stream depends on the seed, the stream and n alone.
//!
//! So training resumes exactly where it stopped with nothing to save but a step number, and the order in which weights
//! are initialised does not matter.

/// A stream of random numbers addressed by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: u64,
}

impl Stream {
    /// The stream of that name for a seed.
    pub fn new(seed: u64, name: &str) -> Self {
        // FNV-1a over the name, so that streams of one seed are unrelated.
        let hash =
            name.bytes().fold(0xCBF2_9CE4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01B3));
        Stream { key: mix(seed ^ mix(hash)) }
    }

    /// 64 random bits.
    pub fn bits(self, index: u64) -> u64 {
        mix(self.key.wrapping_add(index.wrapping_mul(0x9E37_79B9_7F4A_7C15)))
    }

    /// Uniform on [0, 1), a multiple of 2^-53.
    pub fn uniform(self, index: u64) -> f64 {
        (self.bits(index) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform on `0..bound`; `bound` must be positive.
    pub fn below(self, index: u64, bound: u64) -> u64 {
        // The high half of a 128-bit product (Lemire, 2019), without its rejection step: the bias is below bound /
        // 2^64.
        ((u128::from(self.bits(index)) * u128::from(bound)) >> 64) as u64
    }

    /// Standard normal (Box and Muller, 1958).
    pub fn normal(self, index: u64) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform(2 * index)).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform(2 * index + 1)).cos()
    }
}

/// The finaliser of splitmix64 (Steele, Lea and Flood, 2014).
fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_uniform_and_normal() {
        let stream = Stream::new(7, "test");
        let n = 200_000u64;
        let mean = |f: &dyn Fn(u64) -> f64| (0..n).map(f).sum::<f64>() / n as f64;
        assert!((mean(&|i| stream.uniform(i)) - 0.5).abs() < 0.005);
        assert!((mean(&|i| stream.uniform(i).powi(2)) - 1.0 / 3.0).abs() < 0.005);
        assert!(mean(&|i| stream.normal(i)).abs() < 0.01);
        assert!((mean(&|i| stream.normal(i).powi(2)) - 1.0).abs() < 0.02);
        assert!((mean(&|i| stream.normal(i).powi(4)) - 3.0).abs() < 0.15);
    }

    #[test]
    fn below_stays_below_and_reaches_everything() {
        let stream = Stream::new(8, "test");
        let mut seen = [0u32; 10];
        (0..10_000).for_each(|i| seen[stream.below(i, 10) as usize] += 1);
        assert!(seen.iter().all(|&count| (850..1150).contains(&count)), "{seen:?}");
    }

    #[test]
    fn streams_and_seeds_differ() {
        let bits = |seed, name| Stream::new(seed, name).bits(0);
        let all = [bits(0, "a"), bits(1, "a"), bits(0, "b"), bits(1, "b")];
        assert!((0..4).all(|i| (0..i).all(|j| all[i] != all[j])));
        assert_eq!(bits(5, "x"), bits(5, "x"));
    }
}
