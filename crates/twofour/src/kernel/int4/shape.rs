//! The sizes of a packed weight of four-bit integers.

use crate::{
    Error, Result, compressed,
    int4::Granularity,
    kernel::{
        aligned::CACHE_LINE,
        strips::{Order, ROWS},
    },
};

/// Lines of a block, as in strips of floats.
pub(super) const BLOCK_LINES: usize = <f32 as Order>::BLOCK_LINES;

/// Bytes of such a block: positions, then a byte for each row of a line.
pub(super) const BLOCK_BYTES: usize = CACHE_LINE + BLOCK_LINES * ROWS;

/// Columns of a block.
pub(super) const BLOCK_COLS: usize = 4 * BLOCK_LINES;

/// A shape in this layout.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) granularity: Granularity,
}

impl Shape {
    pub(super) fn strips(self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    pub(super) fn lines(self) -> usize {
        compressed::groups_per_row(self.cols)
    }

    pub(super) fn blocks(self) -> usize {
        self.lines().div_ceil(BLOCK_LINES)
    }

    /// Columns with those that complete the last group.
    pub(super) fn padded_cols(self) -> usize {
        4 * self.lines()
    }

    pub(super) fn scales_per_row(self) -> usize {
        self.granularity.scales_per_row(self.cols)
    }

    /// Bytes of a strip without its scales, and of all scales, or `None` where they are too many to count.
    pub(super) fn bytes(self) -> Option<(usize, usize)> {
        let strip = self.blocks().checked_mul(CACHE_LINE)?.checked_add(self.lines().checked_mul(ROWS)?)?;
        let scales = self.strips().checked_mul(self.scales_per_row())?.checked_mul(ROWS * size_of::<f32>())?;
        Some((strip, scales))
    }

    /// The same for memory that there is.
    pub(super) fn present_bytes(self) -> (usize, usize) {
        self.bytes().unwrap_or_default()
    }

    pub(super) fn total(self) -> Result<usize> {
        self.bytes()
            .and_then(|(strip, scales)| strip.checked_mul(self.strips())?.checked_add(scales))
            .ok_or(Error::TooLarge { shape: vec![self.rows, self.cols] })
    }

    pub(super) fn expect(self, bytes: &[u8]) -> Result<()> {
        let (expected, found) = (self.total()?, bytes.len());
        let what = "the packed weight's memory";
        if found == expected { Ok(()) } else { Err(Error::Length { what, expected, found }) }
    }
}
