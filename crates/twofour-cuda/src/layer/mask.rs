//! The mask of a weight in device memory: a u16 for each 4x4 tile.

use cudarc::driver::{CudaSlice, DevicePtr as _, result};
use half::{bf16, f16};
use twofour::{Element, Mask, MatrixRef};

use super::{FreeNote, LayerContext};
use crate::{DataType, DevicePtr, Error, Result, raw::DenseWeight};

/// A mask in device memory.
#[derive(Debug)]
pub(super) struct TileMask {
    _freed: FreeNote,
    rows: usize,
    cols: usize,
    tiles: CudaSlice<u16>,
    tiles_at: DevicePtr,
}

impl TileMask {
    /// Returns a mask that keeps nothing.
    pub(super) fn new(context: &LayerContext, rows: usize, cols: usize) -> Result<Self> {
        context.expect_not_capturing("allocating memory")?;
        let len = (rows.div_ceil(4) * cols.div_ceil(4)).max(1);
        let zeros = context.stream().alloc_zeros::<u16>(len);
        let tiles = zeros.map_err(|error| Error::driver("allocating a mask", error))?;
        let tiles_at = tiles.device_ptr(context.stream()).0;
        Ok(Self { _freed: context.free_note(), rows, cols, tiles, tiles_at })
    }

    /// Returns a copy in memory of its own.
    pub(super) fn copy(&self, context: &LayerContext) -> Result<Self> {
        let tiles = context.copy_of(&self.tiles)?;
        let tiles_at = tiles.device_ptr(context.stream()).0;
        Ok(Self { _freed: context.free_note(), rows: self.rows, cols: self.cols, tiles, tiles_at })
    }

    /// Returns the address.
    pub(super) fn tiles(&self) -> DevicePtr {
        self.tiles_at
    }

    /// Returns the bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        self.tiles.num_bytes()
    }

    /// Overwrites the mask with one of the same shape in host memory.
    pub(super) fn write(&mut self, context: &LayerContext, mask: &Mask) -> Result<()> {
        let failed = |error| Error::driver("copying a mask to the device", error);
        context.stream().memcpy_htod(&tiles(mask), &mut self.tiles).map_err(failed)?;
        context.synchronize()
    }

    /// Returns the tiles in host memory; synchronizes the stream.
    fn to_host(&self, context: &LayerContext) -> Result<Vec<u16>> {
        let failed = |error| Error::driver("copying a mask from the device", error);
        let tiles = context.stream().clone_dtoh(&self.tiles).map_err(failed)?;
        context.synchronize()?;
        Ok(tiles)
    }

    /// Returns a hash of the tiles; synchronizes the stream.
    pub(super) fn hash(&self, context: &LayerContext) -> Result<u64> {
        Ok(hash(&self.to_host(context)?))
    }

    /// Returns a copy in host memory; synchronizes the stream.
    pub(super) fn read(&self, context: &LayerContext) -> Result<Mask> {
        let tiles = self.to_host(context)?;
        let per_row = self.cols.div_ceil(4);
        Ok(Mask::from_fn(self.rows, self.cols, |row, col| {
            tiles[row / 4 * per_row + col / 4] >> (row % 4 * 4 + col % 4) & 1 == 1
        }))
    }
}

/// Returns a hash that every tile's bits and place take part in: words of four tiles, mixed as MurmurHash3 mixes its
/// end (Appleby, public domain), so that a difference in one word spreads over all bits before the next one.
fn hash(tiles: &[u16]) -> u64 {
    let word = |four: &[u16]| four.iter().fold(0u64, |word, tile| word << 16 | u64::from(*tile));
    let mix = |hash: u64, word: u64| {
        let x = hash ^ word;
        let x = (x ^ x >> 33).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        let x = (x ^ x >> 33).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
        (x ^ x >> 33).wrapping_add(0x9E37_79B9_7F4A_7C15)
    };
    tiles.chunks(4).map(word).fold(tiles.len() as u64, mix)
}

/// Returns the tiles of a mask, row by row; at least one. Elements beyond the mask's edges are not kept.
fn tiles(mask: &Mask) -> Vec<u16> {
    let per_row = mask.cols().div_ceil(4);
    let mut tiles = vec![0u16; (mask.rows().div_ceil(4) * per_row).max(1)];
    for row in 0..mask.rows() {
        for col in 0..mask.cols() {
            tiles[row / 4 * per_row + col / 4] |= u16::from(mask.is_kept(row, col)) << (row % 4 * 4 + col % 4);
        }
    }
    tiles
}

/// Returns the mask of a weight's nonzeros, in host memory; synchronizes the stream.
pub(super) fn tiles_of_nonzeros(context: &LayerContext, weight: DenseWeight, dtype: DataType) -> Result<Mask> {
    match dtype {
        DataType::F32 => nonzeros::<f32>(context, weight),
        DataType::F16 => nonzeros::<f16>(context, weight),
        DataType::BF16 => nonzeros::<bf16>(context, weight),
        _ => {
            let (operation, supported) = ("the mask of a weight's nonzeros", "f32, f16, bf16");
            Err(Error::DataType { operation, dtype, supported })
        }
    }
}

fn nonzeros<T: Element>(context: &LayerContext, weight: DenseWeight) -> Result<Mask> {
    let failed = |error| Error::driver("copying a weight from the device", error);
    let mut values = vec![T::ZERO; weight.rows * weight.cols];
    if !values.is_empty() {
        let bytes = bytemuck::cast_slice_mut::<T, u8>(&mut values);
        context.device().bind()?;
        // SAFETY: the weight is valid for its shape, and the stream is waited for before its copy is read.
        unsafe { result::memcpy_dtoh_async(bytes, weight.data, context.stream().cu_stream()) }.map_err(failed)?;
        context.synchronize()?;
    }
    Ok(Mask::of_nonzeros(MatrixRef::new(weight.rows, weight.cols, &values)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_depends_on_every_bit_and_its_place() {
        let tiles: Vec<u16> = (0..11).map(|i| i * 257).collect();
        let mut hashes = std::collections::HashSet::from([hash(&tiles), hash(&tiles[..10]), hash(&[])]);
        for (tile, bit) in (0..11).flat_map(|tile| (0..16).map(move |bit| (tile, bit))) {
            let mut other = tiles.clone();
            other[tile] ^= 1 << bit;
            assert!(hashes.insert(hash(&other)), "tile {tile}, bit {bit}");
        }
    }

    #[test]
    fn tiles_hold_four_bits_of_each_of_four_rows_and_nothing_beyond_the_edges() {
        let mask = Mask::from_fn(5, 6, |row, col| row == 4 || row == 1 && col % 4 == 1);
        assert_eq!(tiles(&mask), [1 << 5, 1 << 5, 0xF, 0x3]);
        assert_eq!(tiles(&Mask::empty(0, 8)), [0]);
    }
}
