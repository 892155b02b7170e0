//! Packing a weight of four-bit integers.

use rayon::prelude::*;

use super::shape::{BLOCK_BYTES, BLOCK_LINES, Shape};
use crate::{
    Compressed, Result,
    compressed::code,
    int4::{Granularity, Int4},
    kernel::{
        aligned::CACHE_LINE,
        strips::{Order, ROWS},
    },
};

/// What is added to an integer, so that four bits without a sign hold it.
pub(super) const OFFSET: i32 = 8;

/// Bytes of a packed four-bit weight `[out_features, in_features]`. The layout is the same for every engine of a CPU. It may change between versions,
/// so it is no file format.
///
/// # Errors
/// [`crate::Error::TooLarge`].
pub fn packed_bytes_int4(out_features: usize, in_features: usize, granularity: Granularity) -> Result<usize> {
    Shape { rows: out_features, cols: in_features, granularity }.total()
}

/// Packs a four-bit weight into borrowed memory of [`packed_bytes_int4`] bytes, at any address.
///
/// # Errors
/// [`crate::Error::Length`], [`crate::Error::TooLarge`].
pub fn pack_int4(weight: &Int4, bytes: &mut [u8]) -> Result<()> {
    let q = weight.weight();
    let shape = Shape { rows: q.rows(), cols: q.cols(), granularity: weight.granularity() };
    shape.expect(bytes)?;
    let (strip_bytes, scale_bytes) = shape.present_bytes();
    let (strips, scales) = bytes.split_at_mut(bytes.len() - scale_bytes);
    let per_row = shape.scales_per_row();
    for (i, bytes) in scales.chunks_exact_mut(size_of::<f32>()).enumerate() {
        let (row, which) = (i / ROWS / per_row * ROWS + i % ROWS, i / ROWS % per_row);
        let scale = if row < shape.rows { weight.scales()[row * per_row + which].to_f32() } else { 0.0 };
        bytes.copy_from_slice(bytemuck::bytes_of(&scale));
    }
    if strip_bytes == 0 {
        return Ok(());
    }
    strips.par_chunks_mut(strip_bytes).enumerate().for_each(|(strip, bytes)| {
        for (i, block) in bytes.chunks_mut(BLOCK_BYTES).enumerate() {
            pack_block(q, strip * ROWS, i * BLOCK_LINES, block);
        }
    });
    Ok(())
}

/// Packs a block of sixteen rows and eight groups.
fn pack_block(q: &Compressed<i8>, first_row: usize, first_group: usize, block: &mut [u8]) {
    let (codes, values) = block.split_at_mut(CACHE_LINE);
    let mut words = [0u32; CACHE_LINE / size_of::<u32>()];
    for (line, values) in values.chunks_mut(ROWS).enumerate() {
        for (row, value) in values.iter_mut().enumerate() {
            let pair = |a: i8, b: i8| (i32::from(a) + OFFSET) as u8 | ((i32::from(b) + OFFSET) as u8) << 4;
            if first_row + row >= q.rows() {
                *value = pair(0, 0);
                continue;
            }
            let [a, b] = q.pair(first_row + row, first_group + line);
            *value = pair(a, b);
            let (first, second) = code::positions(q.code(first_row + row, first_group + line));
            for (which, position) in [first, second].into_iter().enumerate() {
                let (word, bit) = <f32 as Order>::code(row, 0, which);
                words[line * <f32 as Order>::CODE_WORDS + word] |= (position as u32) << bit;
            }
        }
    }
    codes.copy_from_slice(bytemuck::bytes_of(&words));
}
