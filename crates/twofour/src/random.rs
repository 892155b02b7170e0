//! Random numbers from a counter: Philox 4x32 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers:
//! As Easy as 1, 2, 3", SC 2011).

/// Numbers from 0 up to but not 1, multiples of 2⁻²⁴, of a group of a row: one, of four that neighbours share a draw
/// of.
pub(crate) fn one(seed: u64, row: u32, group: u32) -> f32 {
    unit(draw(seed, row, group / 4, 0)[group as usize % 4])
}

/// The same: two, of four that two neighbours share a draw of.
pub(crate) fn two(seed: u64, row: u32, group: u32) -> [f32; 2] {
    let words = draw(seed, row, group / 2, 1);
    let first = group as usize % 2 * 2;
    [words[first], words[first + 1]].map(unit)
}

/// The same: four, of a block of four elements of a row.
pub(crate) fn four(seed: u64, row: u32, block: u32) -> [f32; 4] {
    draw(seed, row, block, 2).map(unit)
}

fn draw(seed: u64, row: u32, block: u32, purpose: u32) -> [u32; 4] {
    philox([block, row, purpose, 0], [seed as u32, (seed >> 32) as u32])
}

fn unit(word: u32) -> f32 {
    (word >> 8) as f32 / (1 << 24) as f32
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let product = |factor: u32, word: u32| u64::from(factor) * u64::from(word);
        let (a, b) = (product(0xD251_1F53, counter[0]), product(0xCD9E_8D57, counter[2]));
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' own library (Random123, `kat_vectors`).
    #[test]
    fn known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let (counter, key) = ([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]);
        assert_eq!(philox(counter, key), [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
    }

    #[test]
    fn numbers_are_spread_evenly() {
        let n = 100_000;
        let mut counts = [0u32; 10];
        for group in 0..n {
            let [u, v] = two(3, group % 7, group / 7);
            for u in [u, v, one(3, group % 7, group / 7)] {
                counts[(u * 10.0) as usize] += 1;
            }
        }
        let expected = 3.0 * f64::from(n) / 10.0;
        assert!(counts.iter().all(|c| (f64::from(*c) - expected).abs() < 5.0 * expected.sqrt()), "{counts:?}");
    }
}
