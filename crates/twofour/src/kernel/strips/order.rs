//! Where the values and positions of each element type lie in a line.

use half::{bf16, f16};

use crate::{Element, kernel::aligned::CACHE_LINE};

/// Rows of a strip.
pub(in crate::kernel) const ROWS: usize = 16;

/// Where an element type's values and positions lie in a line.
pub trait Order: Element {
    /// Groups of a line.
    const GROUPS: usize;

    /// Words of positions of a line.
    const CODE_WORDS: usize;

    /// Values of a line.
    const LINE: usize = Self::GROUPS * 2 * ROWS;

    /// Bytes of a line's values.
    const LINE_BYTES: usize = Self::LINE * size_of::<Self>();

    /// Lines of a block, all but the last of a strip.
    const BLOCK_LINES: usize = CACHE_LINE / (Self::CODE_WORDS * size_of::<u32>());

    /// Bytes of such a block.
    const BLOCK_BYTES: usize = CACHE_LINE + Self::BLOCK_LINES * Self::LINE_BYTES;

    /// Where the value is: `row` of the strip, `group` of the line, first or second (`which`).
    fn value(row: usize, group: usize, which: usize) -> usize;

    /// The word and the bit where its position is.
    fn code(row: usize, group: usize, which: usize) -> (usize, u32);
}

macro_rules! order {
    ($type:ty, $value:expr) => {
        impl Order for $type {
            const GROUPS: usize = 1;
            const CODE_WORDS: usize = 2;
            #[inline(always)]
            fn value(row: usize, _: usize, which: usize) -> usize {
                $value(row, which)
            }
            #[inline(always)]
            fn code(row: usize, _: usize, which: usize) -> (usize, u32) {
                (which, 2 * row as u32)
            }
        }
    };
}

order!(f32, |row, which| which * ROWS + row);
order!(f16, |row, which| which * ROWS + row);
order!(bf16, |row, which| 2 * row + which);

impl Order for i8 {
    const GROUPS: usize = 2;
    const CODE_WORDS: usize = 4;
    #[inline(always)]
    fn value(row: usize, group: usize, which: usize) -> usize {
        row * 4 + group * 2 + which
    }
    #[inline(always)]
    fn code(row: usize, group: usize, which: usize) -> (usize, u32) {
        let place = Self::value(row, group, which);
        let (quad, byte) = (place / 8, place % 8);
        let bit = quad % 2 * 64 + byte * 8 + quad / 2 * 2;
        (bit / 32, (bit % 32) as u32)
    }
}
