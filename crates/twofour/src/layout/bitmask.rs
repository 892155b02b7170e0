//! torch's mask of a weight that is compressed both ways (`_compute_compressed_swizzled_bitmask`).
//!
//! An 8x8 block of the mask takes eight bytes: four little-endian u16s for its 4x4 tiles A (upper left), B (upper
//! right), C (lower left) and D (lower right). Bit `4 * row + col` of a u16 is set where the tile keeps the element.
//! Blocks are in row-major order.

use super::expect_multiple;
use crate::{Error, Mask, Result};

/// The bytes of a mask, `[rows / 8, cols / 8, 8]`.
///
/// # Errors
/// [`Error::Multiple`] unless rows and columns are multiples of 8.
pub fn encode(mask: &Mask) -> Result<Vec<u8>> {
    expect_multiple("rows of the mask", mask.rows(), 8)?;
    expect_multiple("columns of the mask", mask.cols(), 8)?;
    let mut bytes = Vec::with_capacity(mask.rows() * mask.cols() / 8);
    for (row, col) in blocks(mask.rows(), mask.cols()) {
        for (r, c) in [(0, 0), (0, 4), (4, 0), (4, 4)] {
            let tile = (0..4).fold(0u16, |tile, i| tile | (mask.bits(row + r + i, col + c, 4) as u16) << (4 * i));
            bytes.extend(tile.to_le_bytes());
        }
    }
    Ok(bytes)
}

/// The mask of such bytes.
///
/// # Errors
/// [`Error::Multiple`] unless rows and columns are multiples of 8, [`Error::Length`] where the bytes do not fit them.
pub fn decode(rows: usize, cols: usize, bytes: &[u8]) -> Result<Mask> {
    expect_multiple("rows of the mask", rows, 8)?;
    expect_multiple("columns of the mask", cols, 8)?;
    let expected = rows.checked_mul(cols).ok_or_else(|| Error::TooLarge { shape: vec![rows, cols] })? / 8;
    if bytes.len() != expected {
        return Err(Error::Length { what: "bitmask bytes", expected, found: bytes.len() });
    }
    let mut mask = Mask::empty(rows, cols);
    for ((row, col), block) in blocks(rows, cols).zip(bytes.as_chunks::<8>().0) {
        for ((r, c), tile) in [(0, 0), (0, 4), (4, 0), (4, 4)].into_iter().zip(block.as_chunks::<2>().0) {
            let tile = u16::from_le_bytes(*tile);
            for i in (0..16).filter(|i| tile >> i & 1 == 1) {
                mask.keep(row + r + i / 4, col + c + i % 4);
            }
        }
    }
    Ok(mask)
}

/// The upper left corners of the 8x8 blocks.
fn blocks(rows: usize, cols: usize) -> impl Iterator<Item = (usize, usize)> {
    // A shape may have any number of empty rows.
    let rows = if cols == 0 { 0 } else { rows };
    (0..rows).step_by(8).flat_map(move |row| (0..cols).step_by(8).map(move |col| (row, col)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decoding_undoes_encoding(rows in 0usize..4, cols in 0usize..10, seed in any::<u64>()) {
            let mask = Mask::from_fn(8 * rows, 8 * cols, |r, c| (seed ^ (r * 31 + c * 17) as u64).count_ones().is_multiple_of(2));
            let bytes = encode(&mask).unwrap();
            prop_assert_eq!(decode(8 * rows, 8 * cols, &bytes).unwrap(), mask);
        }
    }

    #[test]
    fn tiles_and_bits_are_where_they_belong() {
        let mask = Mask::from_fn(8, 8, |r, c| (r, c) == (0, 1) || (r, c) == (5, 6));
        assert_eq!(encode(&mask).unwrap(), [2, 0, 0, 0, 0, 0, 1 << 6, 0]);
    }
}
