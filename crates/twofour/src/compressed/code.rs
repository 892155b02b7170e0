//! The 4-bit code of a group: which two of its four elements are kept.

/// `first | second << 2` with `first < second`, of each legal pair, in ascending order of code.
pub const LEGAL: [u8; 6] = [0x4, 0x8, 0x9, 0xC, 0xD, 0xE];

/// Whether the code is one of the six.
pub const fn is_legal(code: u8) -> bool {
    // Bit i of the constant is set where i is a legal code.
    code < 16 && 0b0111_0011_0001_0000u16 >> code & 1 == 1
}

/// The positions of the two kept elements.
pub const fn positions(code: u8) -> (usize, usize) {
    ((code & 3) as usize, (code >> 2 & 3) as usize)
}

/// The code that keeps the bits set in `kept` (bit `i` for element `i`; the upper bits are ignored), or `None` where
/// more than two are. With fewer than two the lowest free positions are added, so that the code is always legal:
/// an empty group is `0x4`, the pair (0, 1).
pub const fn of_kept(kept: u8) -> Option<u8> {
    const NONE: u8 = 0xFF;
    const TABLE: [u8; 16] = {
        let mut table = [NONE; 16];
        let mut kept = 0;
        while kept < 16u8 {
            let mut full = kept;
            let mut position = 0;
            while full.count_ones() < 2 {
                full |= 1 << position;
                position += 1;
            }
            if full.count_ones() == 2 {
                let first = full.trailing_zeros() as u8;
                let second = 7 - full.leading_zeros() as u8;
                table[kept as usize] = first | second << 2;
            }
            kept += 1;
        }
        table
    };
    match TABLE[(kept & 15) as usize] {
        NONE => None,
        code => Some(code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_the_six_ascending_pairs_are_legal() {
        for code in 0..=255u8 {
            let (first, second) = positions(code);
            assert_eq!(is_legal(code), code < 16 && first < second, "{code:#x}");
            assert_eq!(is_legal(code), LEGAL.contains(&code));
        }
    }

    #[test]
    fn every_kept_set_of_at_most_two_has_a_legal_code_that_covers_it() {
        for kept in 0..16u8 {
            match of_kept(kept) {
                None => assert!(kept.count_ones() > 2),
                Some(code) => {
                    assert!(kept.count_ones() <= 2 && is_legal(code));
                    let (first, second) = positions(code);
                    assert_eq!(kept & !(1 << first | 1 << second), 0);
                }
            }
        }
        assert_eq!(of_kept(0), Some(0x4));
        assert_eq!(of_kept(0b1000), Some(0xC));
    }
}
