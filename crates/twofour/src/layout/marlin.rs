//! The order of Sparse-Marlin (IST-DASLab, 2024): integers and metadata of a 2:4 weight for `mma.sp`, as vLLM's
//! `marlin_24` kernels read them and compressed-tensors stores them (`marlin-24`).
//!
//! The kept integers, `[cols / 2, rows]` with the columns first, are cut into tiles of 16x16, row-major; a tile is
//! row-major, too. Of each 1024 integers, four tiles, the order is changed so that a thread finds what it multiplies
//! in one load. Integers are stored plus `2^(bits - 1)`, the first in the lowest bits of a word.
//!
//! Metadata are words of 16 bits as in [`super::sm80`], in another order of rows.

use super::{canonical_from_halves, elements, expect_multiple, expect_words, gather, halves, scatter};
use crate::{Compressed, Error, Result};

/// Integers that change their order among each other.
const BLOCK: usize = 1024;

/// Rows and columns of a tile.
const TILE: usize = 16;

/// Words of integers and of metadata.
///
/// # Errors
/// [`Error::Multiple`] unless rows are a multiple of 64 and columns of 32; [`Error::NotFourBits`] where four bits do
/// not hold an integer.
pub fn encode(weight: &Compressed<i8>, bits: Bits) -> Result<(Vec<u32>, Vec<u16>)> {
    let (rows, cols) = (weight.rows(), weight.cols());
    expect_shape(rows, cols)?;
    let kept = cols / 2;
    let half = 1i32 << (bits.count() - 1);
    if let Some(at) = weight.values().iter().position(|q| !(-half..half).contains(&i32::from(*q))) {
        return Err(Error::NotFourBits { row: at / kept, group: at % kept / 2, value: weight.values()[at] });
    }
    let (per_word, order) = (bits.per_word(), permutation(bits));
    let mut words = vec![0u32; weight.values().len() / per_word];
    for (place, (row, at)) in places(rows, kept, &order) {
        let stored = (i32::from(weight.values()[row * kept + at]) + half) as u32;
        words[place / per_word] |= stored << (bits.count() * (place % per_word) as u32);
    }
    let per_row = cols / 16;
    let meta = scatter(&halves(weight)?, |i| self::place(rows, i / per_row, i % per_row));
    Ok((words, meta))
}

/// The weight of words of integers and of metadata.
///
/// # Errors
/// [`Error::Multiple`] unless rows are a multiple of 64 and columns of 32; [`Error::Length`] where the words do not fit
/// them; those of [`Compressed::from_parts`].
pub fn decode(rows: usize, cols: usize, bits: Bits, words: &[u32], meta: &[u16]) -> Result<Compressed<i8>> {
    expect_shape(rows, cols)?;
    let (kept, per_word) = (cols / 2, bits.per_word());
    let count = elements(rows, cols)? / 2;
    expect_words(words, count / per_word)?;
    expect_words(meta, count / 8)?;
    let half = 1i32 << (bits.count() - 1);
    let mut values = crate::memory::zeroed::<i8>(count)?;
    for (place, (row, at)) in places(rows, kept, &permutation(bits)) {
        let stored = words[place / per_word] >> (bits.count() * (place % per_word) as u32);
        let stored = stored & ((1 << bits.count()) - 1);
        values[row * kept + at] = (stored as i32 - half) as i8;
    }
    let per_row = cols / 16;
    let canonical = canonical_from_halves(&gather(meta, |i| place(rows, i / per_row, i % per_row)), cols);
    Compressed::from_parts(rows, cols, values, canonical)
}

/// How many bits an integer takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bits {
    /// Integers from -8 to 7.
    Four,
    /// Integers from -128 to 127.
    Eight,
}

impl Bits {
    /// The number.
    pub fn count(self) -> u32 {
        match self {
            Bits::Four => 4,
            Bits::Eight => 8,
        }
    }

    /// Integers in a word.
    pub fn per_word(self) -> usize {
        32 / self.count() as usize
    }
}

/// Where each of 1024 integers comes from.
fn permutation(bits: Bits) -> Vec<usize> {
    let interleave: &[usize] = match bits {
        Bits::Four => &[0, 2, 4, 6, 1, 3, 5, 7],
        Bits::Eight => &[0, 2, 1, 3],
    };
    let mut order = Vec::with_capacity(BLOCK);
    for lane in 0..32 {
        let (first, column) = (2 * (lane % 4), lane / 4);
        for j in 0..4 {
            for block in 0..2 {
                let rows = [first, first + 1, first + 8, first + 9];
                order.extend(rows.map(|row| TILE * row + column / 2 * 256 + 8 * (column % 2) + 4 * block + j));
            }
        }
    }
    order.chunks(interleave.len()).flat_map(|part| interleave.iter().map(|i| part[*i])).collect()
}

/// The place of each integer, with its row and its position among the kept ones of that.
fn places<'a>(rows: usize, kept: usize, order: &'a [usize]) -> impl Iterator<Item = (usize, (usize, usize))> + use<'a> {
    (0..rows * kept).map(move |place| {
        let from = place / BLOCK * BLOCK + order[place % BLOCK];
        // Tiles of 16 kept positions and 16 rows.
        let (strip, inside) = (from / (rows * TILE), from % (rows * TILE));
        let (tile, inside) = (inside / (TILE * TILE), inside % (TILE * TILE));
        (place, (tile * TILE + inside % TILE, strip * TILE + inside / TILE))
    })
}

/// The place of the metadata word of row `m` and column `c`.
fn place(rows: usize, m: usize, mut c: usize) -> usize {
    let mut r = m / 64 * 64 + m % 2 * 2 + m % 8 / 4 + m % 4 / 2 * 32 + m % 64 / 8 * 4;
    match (r % 2, c % 2) {
        (0, 1) => (r, c) = (r + 1, c - 1),
        (1, 0) => (r, c) = (r - 1, c + 1),
        _ => {}
    }
    c / 2 * 2 * rows + 2 * r + c % 2
}

/// The order of scales of groups, in which each 64 of a row of `[groups, rows]` are stored: the scale at place `i` is
/// that of row `scale_row(i)`.
pub fn scale_row(i: usize) -> usize {
    i / 8 * 8 + [0, 4, 1, 5, 2, 6, 3, 7][i % 8]
}

fn expect_shape(rows: usize, cols: usize) -> Result<()> {
    expect_multiple("rows of the weight", rows, 64)?;
    expect_multiple("columns of the weight", cols, 32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::MatrixRef;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn decoding_undoes_encoding(rows in 1usize..3, cols in 1usize..5, seed in any::<u32>()) {
            let (rows, cols) = (64 * rows, 32 * cols);
            let random = |i: usize| ((i as u32).wrapping_mul(2654435761) ^ seed).wrapping_mul(0x85EB_CA6B) >> 13;
            let dense: Vec<i8> = (0..rows * cols).map(|i| (random(i) % 16) as i8 - 8).collect();
            let weight = Compressed::from_pruned(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
            for bits in [Bits::Four, Bits::Eight] {
                let (words, meta) = encode(&weight, bits).unwrap();
                prop_assert_eq!(&decode(rows, cols, bits, &words, &meta).unwrap(), &weight);
            }
        }
    }

    #[test]
    fn shapes_and_integers_that_do_not_fit_are_refused() {
        assert!(matches!(decode(32, 32, Bits::Four, &[], &[]), Err(Error::Multiple { multiple: 64, .. })));
        assert!(matches!(decode(64, 48, Bits::Four, &[], &[]), Err(Error::Multiple { multiple: 32, .. })));
        assert!(matches!(decode(64, 32, Bits::Four, &[], &[]), Err(Error::Length { expected: 128, .. })));
        assert!(matches!(decode(64, 32, Bits::Four, &[0; 128], &[]), Err(Error::Length { expected: 128, .. })));
        let huge = 1 << 62;
        assert!(matches!(decode(huge, huge, Bits::Eight, &[], &[]), Err(Error::TooLarge { .. })));
        let mut dense = vec![0i8; 64 * 32];
        dense[33] = 8;
        let weight = Compressed::from_dense(MatrixRef::new(64, 32, &dense).unwrap()).unwrap();
        assert!(matches!(encode(&weight, Bits::Four), Err(Error::NotFourBits { row: 1, group: 0, value: 8 })));
    }
}
