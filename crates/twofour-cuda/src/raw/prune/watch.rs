//! What a pass reports beside its results: a NaN in the weight, and the flips of the mask.

use crate::{DevicePtr, Error, Result};

/// Device memory that receives NaN and flip counts.
#[derive(Debug, Clone, Copy)]
pub struct Watch {
    /// A u64 that receives the index, `row * cols + col`, of the first NaN if it is less than the u64's value; it must
    /// be [`NO_NAN`] before. [`MaskChoice::Given`](super::MaskChoice::Given) does not check, because a given mask needs
    /// no order of elements.
    pub nan: DevicePtr,
    /// The mask before, which may be in the memory of [`BothWays::tiles`](super::BothWays::tiles), and a u64 to which
    /// the number of elements that differ is added.
    pub flips: Option<(DevicePtr, DevicePtr)>,
}

/// The value of [`Watch::nan`] where no NaN was found.
pub const NO_NAN: u64 = u64::MAX;

/// Returns the error for the value of [`Watch::nan`] after a pass over a weight with `cols` columns.
///
/// # Errors
/// [`Error::NotANumber`].
///
/// ```
/// use twofour_cuda::raw::prune::{NO_NAN, first_nan};
/// assert!(first_nan(NO_NAN, 64).is_ok());
/// assert!(first_nan(130, 64).unwrap_err().to_string().contains("row 2, column 2"));
/// ```
pub fn first_nan(found: u64, cols: usize) -> Result<()> {
    match found {
        NO_NAN => Ok(()),
        index => Err(Error::NotANumber { row: (index / cols as u64) as usize, col: (index % cols as u64) as usize }),
    }
}
