//! Masks as tensors of tiles.

use twofour::Mask;

use crate::torch::{Failure, Result, ScalarType, Tensor};

/// A mask as a tensor: an int16 for each 4x4 tile, `[ceil(rows / 4), ceil(cols / 4)]`, with bit `4 * row + column` set
/// where the tile keeps the element.
pub(crate) fn to_tiles(mask: &Mask) -> Result<Tensor> {
    let (down, across) = (mask.rows().div_ceil(4), mask.cols().div_ceil(4));
    let mut out = Tensor::empty(&[down as i64, across as i64], ScalarType::I16)?;
    let tiles = out.elements_mut::<u16>()?;
    tiles.fill(0);
    for row in 0..mask.rows() {
        let words = mask.row_words(row);
        for (col, tile) in tiles[row / 4 * across..][..across].iter_mut().enumerate() {
            let four = words[col / 16] >> (col % 16 * 4) & 15;
            *tile |= (four as u16) << (row % 4 * 4);
        }
    }
    Ok(out)
}

/// A mask of that shape from a tensor of tiles.
///
/// # Errors
/// A `RuntimeError` for another shape, a `NotImplementedError` for another type.
pub(crate) fn from_tiles(tiles: &Tensor, rows: usize, cols: usize) -> Result<Mask> {
    let (found, expected) = (tiles.matrix("the mask")?, (rows.div_ceil(4), cols.div_ceil(4)));
    if found != expected {
        return Err(Failure::runtime(format!(
            "the mask has {found:?} tiles; a matrix of shape {:?} has {expected:?}",
            (rows, cols)
        )));
    }
    let tiles = tiles.elements::<u16>("the mask", ScalarType::I16)?;
    Ok(Mask::from_fn(rows, cols, |row, col| tiles[row / 4 * expected.1 + col / 4] >> (row % 4 * 4 + col % 4) & 1 == 1))
}
