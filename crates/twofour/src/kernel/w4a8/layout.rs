//! Where the values, metadata and scales of a packed int4 weight lie.
//!
//! Strips of sixteen rows, as in [`super::super::strips`]. A strip is a sequence of groups of columns, each with a header of one cache line, sixteen
//! scales in f16 and sixteen sums of the rows' integers in i16, and then its blocks. A block of 32 columns has a cache line of metadata, as that of int8,
//! and two of integers: the byte that int8 has for a value in line `2i` of the block has it in the lower four bits here, and that of line `2i + 1` in the
//! upper four. So what a product reads is one stream for each strip.

use half::f16;
use rayon::prelude::*;

#[cfg(target_arch = "x86_64")]
use crate::kernel::decode::strips::StripSource;
use crate::{
    Compressed, Error, Result,
    compressed::{self, code},
    int4::{Granularity, Int4},
    kernel::{
        aligned::{Aligned, CACHE_LINE},
        strips::{Order, ROWS},
    },
};

/// Columns of a block: four lines of two groups of four.
pub(super) const BLOCK_COLS: usize = 32;

/// Bytes of a block.
pub(super) const BLOCK_BYTES: usize = 3 * CACHE_LINE;

/// Columns that a row's one scale is repeated for, so that sums of sixteen bits hold what a group sums.
const ROW_COLS: usize = 256;

const LINE_COLS: usize = 4 * <i8 as Order>::GROUPS;

/// The shape of a packed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) granularity: Granularity,
}

impl Shape {
    fn blocks(self) -> usize {
        self.cols.div_ceil(BLOCK_COLS)
    }

    /// Blocks of a group with one header, but for a strip's last.
    fn group_blocks(self) -> usize {
        self.granularity.columns().unwrap_or(ROW_COLS) / BLOCK_COLS
    }

    /// Bytes of a strip, which is about as large as the columns that it serves.
    pub(super) fn strip_bytes(self) -> usize {
        self.blocks().div_ceil(self.group_blocks()) * CACHE_LINE + self.blocks() * BLOCK_BYTES
    }

    /// Where a block starts in a strip, and its group's header.
    fn block_at(self, block: usize) -> (usize, usize) {
        let header = block / self.group_blocks() * (CACHE_LINE + self.group_blocks() * BLOCK_BYTES);
        (header + CACHE_LINE + block % self.group_blocks() * BLOCK_BYTES, header)
    }

    /// Bytes of all strips.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    fn bytes(self) -> Result<usize> {
        let too_large = Error::TooLarge { shape: vec![self.rows, self.cols] };
        // A strip has fewer bytes than sixteen rows of columns, and a header.
        if self.cols.checked_add(2 * ROW_COLS).and_then(|cols| cols.checked_mul(ROWS)).is_none() {
            return Err(too_large);
        }
        self.strip_bytes().checked_mul(self.rows.div_ceil(ROWS)).ok_or(too_large)
    }
}

/// The place in a block of a kept value of a row: byte and shift.
fn value_at(row: usize, group: usize, which: usize) -> (usize, u32) {
    let (line, in_line) = (group / <i8 as Order>::GROUPS, group % <i8 as Order>::GROUPS);
    let place = <i8 as Order>::value(row, in_line, which);
    (CACHE_LINE + line / 2 * CACHE_LINE + place, (line % 2 * 4) as u32)
}

/// The place in a block of a kept value's position: byte and shift.
fn code_at(row: usize, group: usize, which: usize) -> (usize, u32) {
    let (line, in_line) = (group / <i8 as Order>::GROUPS, group % <i8 as Order>::GROUPS);
    let (word, bit) = <i8 as Order>::code(row, in_line, which);
    ((line * <i8 as Order>::CODE_WORDS + word) * size_of::<u32>() + bit as usize / 8, bit % 8)
}

/// A packed int4 weight.
#[derive(Debug, Clone)]
pub(super) struct Packed {
    pub(super) shape: Shape,
    bytes: Aligned<u8>,
}

impl Packed {
    pub(super) fn new(weight: &Int4) -> Result<Self> {
        let q = weight.weight();
        let shape = Shape { rows: q.rows(), cols: q.cols(), granularity: weight.granularity() };
        let mut bytes = Aligned::try_zeroed(shape.bytes()?)?;
        // A weight without columns would make empty chunks; there is then nothing to fill.
        let strips = bytes.par_chunks_mut(shape.strip_bytes().max(1));
        strips.enumerate().for_each(|(strip, bytes)| fill(weight, shape, strip * ROWS, bytes));
        Ok(Self { shape, bytes })
    }

    pub(super) fn view(&self) -> PackedRef<'_> {
        PackedRef { shape: self.shape, bytes: &self.bytes }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The canonical form.
    pub(super) fn to_int4(&self) -> Result<Int4> {
        let Shape { rows, cols, granularity } = self.shape;
        let (groups, words) = (compressed::groups_per_row(cols), compressed::meta_words_per_row(cols));
        let per_row = granularity.scales_per_row(cols);
        let (mut values, mut meta) = (Vec::with_capacity(2 * rows * groups), vec![0u32; rows * words]);
        let mut scales = vec![f16::ZERO; rows * per_row];
        for row in 0..rows {
            let strip = self.view().strip_of(row / ROWS);
            for group in 0..groups {
                let kept = strip.kept(row % ROWS, group);
                values.extend(kept.map(|(_, q)| q));
                let [(first, _), (second, _)] = kept;
                meta[row * words + group / 8] |= ((first | second << 2) as u32) << (group % 8 * 4);
                scales[row * per_row + granularity.scale_of(group * 4)] = strip.scale(row % ROWS, group / 8);
            }
        }
        Int4::from_parts(Compressed::from_parts(rows, cols, values, meta)?, scales, granularity)
    }
}

/// Fills a strip from row `first` on.
fn fill(weight: &Int4, shape: Shape, first: usize, bytes: &mut [u8]) {
    let q = weight.weight();
    for row in 0..ROWS.min(shape.rows - first) {
        for group in 0..compressed::groups_per_row(shape.cols) {
            let (block, header) = shape.block_at(group / 8);
            if (group / 8).is_multiple_of(shape.group_blocks()) && group.is_multiple_of(8) {
                let scale = weight.scale(first + row, group * 4);
                bytes[header + 2 * row..][..2].copy_from_slice(&scale.to_le_bytes());
            }
            let pair = q.pair(first + row, group);
            let (a, b) = code::positions(q.code(first + row, group));
            for (which, (value, position)) in pair.into_iter().zip([a, b]).enumerate() {
                let (byte, shift) = value_at(row, group % 8, which);
                bytes[block + byte] |= (value as u8 & 15) << shift;
                let (byte, shift) = code_at(row, group % 8, which);
                bytes[block + byte] |= (position as u8) << shift;
            }
            let sum = &mut bytes[header + CACHE_LINE / 2 + 2 * row..][..2];
            let before = i16::from_le_bytes([sum[0], sum[1]]);
            let sum_with_it = before + i16::from(pair[0]) + i16::from(pair[1]);
            sum.copy_from_slice(&sum_with_it.to_le_bytes());
        }
    }
}

/// A packed int4 weight, borrowed.
#[derive(Debug, Clone, Copy)]
pub(super) struct PackedRef<'a> {
    pub(super) shape: Shape,
    bytes: &'a [u8],
}

/// Sixteen rows of a packed int4 weight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strip<'a> {
    shape: Shape,
    bytes: &'a [u8],
}

#[cfg(target_arch = "x86_64")]
impl<'a> StripSource for PackedRef<'a> {
    type Strip = Strip<'a>;

    #[inline(always)]
    fn strip(&self, i: usize) -> Strip<'a> {
        self.strip_of(i)
    }

    fn padded_cols(&self) -> usize {
        self.shape.cols.next_multiple_of(BLOCK_COLS)
    }
}

impl<'a> PackedRef<'a> {
    /// One strip.
    #[inline(always)]
    pub(super) fn strip_of(&self, i: usize) -> Strip<'a> {
        let bytes = self.shape.strip_bytes();
        Strip { shape: self.shape, bytes: &self.bytes[i * bytes..][..bytes] }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }
}

impl Strip<'_> {
    /// Where its first header is: a cache line.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn as_ptr(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    /// The numbers of blocks of its groups.
    #[inline(always)]
    pub(super) fn groups(&self) -> impl Iterator<Item = usize> + use<> {
        let (blocks, most) = (self.shape.blocks(), self.shape.group_blocks());
        (0..blocks).step_by(most).map(move |first| most.min(blocks - first))
    }

    /// What a row keeps of four columns: positions and integers.
    pub(super) fn kept(&self, row: usize, group: usize) -> [(usize, i8); 2] {
        let (block, _) = self.shape.block_at(group / 8);
        [0, 1].map(|which| {
            let (byte, shift) = code_at(row, group % 8, which);
            let position = self.bytes[block + byte] >> shift & 3;
            let (byte, shift) = value_at(row, group % 8, which);
            // The sign of four bits: shifted to the top and back.
            let value = ((self.bytes[block + byte] >> shift << 4) as i8) >> 4;
            (position as usize, value)
        })
    }

    /// The scale of a row in a block.
    pub(super) fn scale(&self, row: usize, block: usize) -> f16 {
        let (_, header) = self.shape.block_at(block);
        f16::from_le_bytes([self.bytes[header + 2 * row], self.bytes[header + 2 * row + 1]])
    }
}

const _: () = assert!(BLOCK_COLS == LINE_COLS * <i8 as Order>::BLOCK_LINES);
