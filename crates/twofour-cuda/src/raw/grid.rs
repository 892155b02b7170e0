//! Grids of kernels whose threads each handle a part of a matrix.

use super::DenseWeight;
pub use crate::device::MAX_GRID_ROWS;
use crate::{
    Error, Result, Stream,
    device::{Kernel, Launch},
};

/// Elements along a side of the largest square that a CTA handles.
pub const SIDE: usize = 128;

/// Threads of a CTA.
pub const BLOCK: u32 = 256;

/// Returns the rows and columns of a matrix as kernels take them.
pub(crate) fn shape(weight: DenseWeight) -> Result<(u32, u32)> {
    let too_large = || Error::TooLarge { rows: weight.rows, cols: weight.cols };
    // Kernels round up to multiples of the square's side.
    let side = |n: usize| u32::try_from(n).ok().filter(|n| *n <= u32::MAX - SIDE as u32).ok_or_else(too_large);
    Ok((side(weight.rows)?, side(weight.cols)?))
}

/// Returns the threads of a CTA for a row of this many bytes: one for every 16 bytes, in whole warps, at most `most`.
pub fn threads_of_row(bytes: usize, most: u32) -> u32 {
    bytes.div_ceil(16).next_multiple_of(32).clamp(32, most as usize) as u32
}

/// Returns the CTAs of [`BLOCK`] threads in which each thread handles `each` of `count` elements.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn blocks_of_elements(count: u64, each: u64) -> Result<u32> {
    let blocks = count.div_ceil(each * u64::from(BLOCK));
    if blocks <= i32::MAX as u64 { Ok(blocks as u32) } else { Err(Error::TooLarge { rows: 1, cols: count as usize }) }
}

impl Kernel {
    /// Launches CTAs of [`BLOCK`] threads in which each thread handles `each` of `count` elements; nothing for none.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; those of [`Kernel::launch`].
    ///
    /// # Safety
    /// That of [`Kernel::launch`].
    pub unsafe fn launch_over<P>(&self, stream: Stream, (count, each): (u64, u64), parameter: &P) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let launch = Launch::simple((blocks_of_elements(count, each)?, 1), BLOCK);
        // SAFETY: the parameter has the kernel's layout, and its pointers and the stream are valid, as this function
        // requires.
        unsafe { self.launch(stream, launch, parameter) }
    }
}

/// Returns the CTAs of a grid with this many threads.
pub(crate) fn blocks(threads: u64, weight: DenseWeight) -> Result<u32> {
    let blocks = threads.div_ceil(u64::from(BLOCK));
    let most = i32::MAX as u64;
    if blocks <= most { Ok(blocks as u32) } else { Err(Error::TooLarge { rows: weight.rows, cols: weight.cols }) }
}
