//! Random numbers, and results as numbers.

use half::{bf16, f16};
use twofour_cuda::DataType;

/// Bytes after the result that must stay as they are.
pub(crate) const GUARD: usize = 4096;

const CODES: [u32; 6] = [0x4, 0x8, 0xC, 0x9, 0xD, 0xE];

/// A source of numbers between -2 and 2, more of them near 0.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32
    }

    pub(crate) fn number(&mut self) -> f32 {
        (0..4).map(|_| self.bits() as f32 / 2f32.powi(31) - 0.5).sum()
    }

    /// A word of metadata: eight of the six codes.
    pub(crate) fn codes(&mut self) -> u32 {
        (0..8).fold(0, |word, i| word | CODES[self.bits() as usize % 6] << (4 * i))
    }
}

/// The value of a result, and how far rounding may have taken it from a true one.
pub(crate) fn result(bytes: &[u8], output: DataType, truth: f64) -> (f64, f64) {
    let relative = |precision: i32| truth.abs() * 2f64.powi(precision);
    match output {
        // Below f16's least normal number the distance between its numbers stays as it is.
        DataType::F16 => (f16::from_le_bytes(bytes.try_into().unwrap()).to_f64(), relative(-11).max(2f64.powi(-25))),
        DataType::BF16 => (bf16::from_le_bytes(bytes.try_into().unwrap()).to_f64(), relative(-8)),
        DataType::F32 => (f64::from(f32::from_le_bytes(bytes.try_into().unwrap())), relative(-22)),
        DataType::I32 => (f64::from(i32::from_le_bytes(bytes.try_into().unwrap())), 0.0),
        other => panic!("no result is {other}"),
    }
}

/// Finite numbers with ties, zeros of both signs, large and subnormal ones among them.
pub(crate) fn adversarial(len: usize, seed: u64) -> Vec<f32> {
    const SPECIAL: [f32; 14] =
        [0.0, -0.0, 1.0, -1.0, 1.0, -1.0, 0.5, 1e-40, -6e-8, 6.1e-5, 30_000.0, -60_000.0, 2.0, 1.5];
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let number = |_| match random.bits() % 4 {
        0 => SPECIAL[random.bits() as usize % SPECIAL.len()],
        1 => (random.bits() % 3) as f32 - 1.0,
        _ => random.number(),
    };
    (0..len).map(number).collect()
}
