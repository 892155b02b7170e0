//! CUTLASS 3.x order of metadata for `wgmma.sp` on sm_90a.
//!
//! The metadata lies in atoms of 64 rows and T columns, where T is the kernel's tile along the reduction axis, at most
//! 128. Atoms run down the rows first, then along the columns. Inside an atom (derived from CUTLASS's
//! `Sm90GemmSparseConfig`):
//!
//! - 16-bit data: u32 word `T/32 · (m/16·16 + k/16%2·8 + m%8) + k/32`, its lower half for rows with `m/8` even, its
//!   upper for those with `m/8` odd. A thread's words are neighbours.
//! - 8-bit data: row-major.
//!
//! Metadata made for one T is wrong for another: hence [`TileK`].

use super::{canonical_from_halves, elements, expect_multiple, expect_words, gather, halves, scatter};
use crate::{Compressed, Element, Result};

/// Rows of an atom.
const ATOM_ROWS: usize = 64;

/// The tile of the kernel along the reduction axis, in elements; larger tiles use 128.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum TileK {
    K32,
    K64,
    K128,
}

impl TileK {
    /// All of them.
    pub const ALL: [TileK; 3] = [TileK::K32, TileK::K64, TileK::K128];

    /// Columns of an atom.
    pub fn columns(self) -> usize {
        match self {
            TileK::K32 => 32,
            TileK::K64 => 64,
            TileK::K128 => 128,
        }
    }
}

/// Index, in u16s, of the metadata of row `m` and columns `16 c ..`.
fn place_16(rows: usize, tile_k: usize, m: usize, c: usize) -> usize {
    let (atom, inside) = atom(rows, tile_k, m, 16 * c);
    let (m, k) = inside;
    let word = tile_k / 32 * (m / 16 * 16 + k / 16 % 2 * 8 + m % 8) + k / 32;
    atom * (ATOM_ROWS * tile_k / 16) + 2 * word + m / 8 % 2
}

/// Index, in u32s, of the metadata of row `m` and columns `32 c ..`.
fn place_8(rows: usize, tile_k: usize, m: usize, c: usize) -> usize {
    let (atom, (m, k)) = atom(rows, tile_k, m, 32 * c);
    atom * (ATOM_ROWS * tile_k / 32) + m * (tile_k / 32) + k / 32
}

/// The atom that an element lies in, and its place there.
fn atom(rows: usize, tile_k: usize, m: usize, k: usize) -> (usize, (usize, usize)) {
    (k / tile_k * (rows / ATOM_ROWS) + m / ATOM_ROWS, (m % ATOM_ROWS, k % tile_k))
}

/// Metadata of a weight of 16-bit elements (f16, bf16), `rows * cols / 16` u16s.
///
/// # Errors
/// [`crate::Error::Multiple`] unless rows are a multiple of 64 and columns of the tile.
pub fn encode_16<T: Element>(weight: &Compressed<T>, tile_k: TileK) -> Result<Vec<u16>> {
    expect(weight.rows(), weight.cols(), tile_k)?;
    let per_row = weight.cols() / 16;
    Ok(scatter(&halves(weight)?, |i| place_16(weight.rows(), tile_k.columns(), i / per_row, i % per_row)))
}

/// Canonical metadata from that of a `[rows, cols]` weight of 16-bit elements.
///
/// # Errors
/// As [`encode_16`], and [`crate::Error::Length`] where the words do not fit the shape.
pub fn decode_16(rows: usize, cols: usize, tile_k: TileK, words: &[u16]) -> Result<Vec<u32>> {
    expect(rows, cols, tile_k)?;
    expect_words(words, elements(rows, cols)? / 16)?;
    let per_row = cols / 16;
    let ordered = gather(words, |i| place_16(rows, tile_k.columns(), i / per_row, i % per_row));
    Ok(canonical_from_halves(&ordered, cols))
}

/// Metadata of a weight of 8-bit elements (i8, fp8), `rows * cols / 32` u32s.
///
/// # Errors
/// [`crate::Error::Multiple`] unless rows are a multiple of 64 and columns of the tile.
pub fn encode_8<T: Element>(weight: &Compressed<T>, tile_k: TileK) -> Result<Vec<u32>> {
    expect(weight.rows(), weight.cols(), tile_k)?;
    let per_row = weight.cols() / 32;
    Ok(scatter(weight.meta(), |i| place_8(weight.rows(), tile_k.columns(), i / per_row, i % per_row)))
}

/// Canonical metadata from that of a `[rows, cols]` weight of 8-bit elements.
///
/// # Errors
/// As [`encode_8`], and [`crate::Error::Length`] where the words do not fit the shape.
pub fn decode_8(rows: usize, cols: usize, tile_k: TileK, words: &[u32]) -> Result<Vec<u32>> {
    expect(rows, cols, tile_k)?;
    expect_words(words, elements(rows, cols)? / 32)?;
    let per_row = cols / 32;
    Ok(gather(words, |i| place_8(rows, tile_k.columns(), i / per_row, i % per_row)))
}

fn expect(rows: usize, cols: usize, tile_k: TileK) -> Result<()> {
    expect_multiple("rows of the weight", rows, ATOM_ROWS)?;
    expect_multiple("columns of the weight", cols, tile_k.columns())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the order is for: the metadata words of one thread's 16 columns-blocks follow each other, so that one
    /// 128-bit load fetches them, and a word pairs the rows r and r + 8 of one `wgmma.sp` fragment.
    #[test]
    fn a_threads_words_are_neighbours() {
        for m in [0, 3, 17, 40] {
            for half in 0..2 {
                let places: Vec<usize> = (0..4).map(|block| place_16(64, 128, m, 2 * block + half)).collect();
                assert!(places.windows(2).all(|p| p[1] == p[0] + 2), "{places:?}");
            }
        }
        assert_eq!(place_16(64, 128, 8, 0), place_16(64, 128, 0, 0) + 1);
    }
}
