//! CUTLASS 2.x order of metadata, `ColumnMajorInterleaved<2>` after reordering, for `mma.sp` on sm_80 to sm_89.
//!
//! Metadata elements hold 16 columns of 16-bit data (a u16) or 32 columns of 8-bit data (a u32). Their places, for a
//! weight of `rows` rows and with `c` the element's column, are (derived from CUTLASS's `reorder_meta`; proved equal to
//! its two steps by this module's tests):
//!
//! - 16-bit: `(c/2)·2·rows + (m/32)·64 + (m%8)·8 + (m%32/16)·4 + (c%2)·2 + m%16/8`
//! - 8-bit: `(c/2)·2·rows + (m/16)·32 + (m%8)·4 + (c%2)·2 + m%16/8`

use super::{canonical_from_halves, elements, expect_multiple, expect_words, gather, halves, scatter};
use crate::{Compressed, Element, Result};

/// Place of the element of row `m` and column `c`.
fn place_16(rows: usize, m: usize, c: usize) -> usize {
    c / 2 * 2 * rows + m / 32 * 64 + m % 8 * 8 + m % 32 / 16 * 4 + c % 2 * 2 + m % 16 / 8
}

/// Place of the element of row `m` and column `c`.
fn place_8(rows: usize, m: usize, c: usize) -> usize {
    c / 2 * 2 * rows + m / 16 * 32 + m % 8 * 4 + c % 2 * 2 + m % 16 / 8
}

/// Metadata of a weight of 16-bit elements (f16, bf16), `rows * cols / 16` u16s.
///
/// # Errors
/// [`crate::Error::Multiple`] unless rows and columns are multiples of 32.
pub fn encode_16<T: Element>(weight: &Compressed<T>) -> Result<Vec<u16>> {
    expect_16(weight.rows(), weight.cols())?;
    let per_row = weight.cols() / 16;
    Ok(scatter(&halves(weight)?, |i| place_16(weight.rows(), i / per_row, i % per_row)))
}

/// Canonical metadata from that of a `[rows, cols]` weight of 16-bit elements.
///
/// # Errors
/// [`crate::Error::Multiple`] unless rows and columns are multiples of 32, [`crate::Error::Length`] where the words do
/// not fit them.
pub fn decode_16(rows: usize, cols: usize, words: &[u16]) -> Result<Vec<u32>> {
    expect_16(rows, cols)?;
    expect_words(words, elements(rows, cols)? / 16)?;
    let per_row = cols / 16;
    Ok(canonical_from_halves(&gather(words, |i| place_16(rows, i / per_row, i % per_row)), cols))
}

/// Metadata of a weight of 8-bit elements (i8, fp8), `rows * cols / 32` u32s.
///
/// # Errors
/// [`crate::Error::Multiple`] unless rows are a multiple of 16 and columns of 64.
pub fn encode_8<T: Element>(weight: &Compressed<T>) -> Result<Vec<u32>> {
    expect_8(weight.rows(), weight.cols())?;
    let per_row = weight.cols() / 32;
    Ok(scatter(weight.meta(), |i| place_8(weight.rows(), i / per_row, i % per_row)))
}

/// Canonical metadata from that of a `[rows, cols]` weight of 8-bit elements.
///
/// # Errors
/// [`crate::Error::Multiple`] unless rows are a multiple of 16 and columns of 64, [`crate::Error::Length`] where the
/// words do not fit them.
pub fn decode_8(rows: usize, cols: usize, words: &[u32]) -> Result<Vec<u32>> {
    expect_8(rows, cols)?;
    expect_words(words, elements(rows, cols)? / 32)?;
    let per_row = cols / 32;
    Ok(gather(words, |i| place_8(rows, i / per_row, i % per_row)))
}

// The columns are interleaved two by two, so there must be an even number of metadata elements in a row.
fn expect_16(rows: usize, cols: usize) -> Result<()> {
    expect_multiple("rows of the weight", rows, 32)?;
    expect_multiple("columns of the weight", cols, 32)
}

fn expect_8(rows: usize, cols: usize) -> Result<()> {
    expect_multiple("rows of the weight", rows, 16)?;
    expect_multiple("columns of the weight", cols, 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The peers' own two steps: rows are permuted inside groups, then neighbours in a 2x2 block of (row, column) are
    /// exchanged.
    fn two_steps(rows: usize, group: usize, interleave: usize, m: usize, mut c: usize) -> usize {
        let mut r = m / group * group + m % 8 * interleave + m % group / 8;
        match (r % 2, c % 2) {
            (0, 1) => (r, c) = (r + 1, c - 1),
            (1, 0) => (r, c) = (r - 1, c + 1),
            _ => {}
        }
        c / 2 * 2 * rows + 2 * r + c % 2
    }

    #[test]
    fn the_closed_forms_are_the_peers_two_steps() {
        for rows in [32, 64, 128, 160] {
            for (m, c) in (0..rows).flat_map(|m| (0..6).map(move |c| (m, c))) {
                assert_eq!(place_16(rows, m, c), two_steps(rows, 32, 4, m, c), "16-bit, {rows} rows, ({m}, {c})");
                assert_eq!(place_8(rows, m, c), two_steps(rows, 16, 2, m, c), "8-bit, {rows} rows, ({m}, {c})");
            }
        }
    }
}
