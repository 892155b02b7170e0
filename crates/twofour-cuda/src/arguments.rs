//! Validation of the arguments of calls: dimensions, pointers, memory.

use crate::{
    DataType, DevicePtr, Error, Result,
    context::LayerContext,
    memory::{DeviceSlice, DeviceSliceMut},
};

/// Most elements along a dimension: kernels count them in 32 bits.
pub const MAX_DIMENSION: usize = i32::MAX as usize;

/// Returns a dimension as kernels take it.
///
/// # Errors
/// [`Error::Dimension`] above [`MAX_DIMENSION`].
pub fn side(what: &'static str, size: usize) -> Result<u32> {
    if size <= MAX_DIMENSION { Ok(size as u32) } else { Err(Error::Dimension { what, size, most: MAX_DIMENSION }) }
}

/// Returns a dimension of at least 1.
///
/// # Errors
/// [`Error::Dimension`] for 0 and above [`MAX_DIMENSION`].
pub fn positive(what: &'static str, size: usize) -> Result<u32> {
    expect_dimension(what, size, MAX_DIMENSION)?;
    Ok(size as u32)
}

/// Returns `rows * cols`, checked.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn product(rows: usize, cols: usize) -> Result<usize> {
    rows.checked_mul(cols).ok_or(Error::TooLarge { rows, cols })
}

/// Memory that a call reads or writes.
pub trait Memory {
    /// Returns the address, after checking the device, data type and number of elements, and its alignment to an
    /// element.
    ///
    /// # Errors
    /// [`Error::OtherDevice`], [`Error::SliceType`], [`Error::Length`], [`Error::Pointer`].
    fn at(&self, what: &'static str, context: &LayerContext, dtype: DataType, len: usize) -> Result<DevicePtr>;
}

macro_rules! memory {
    ($($type:ty),*) => {$(
        impl Memory for $type {
            fn at(&self, what: &'static str, context: &LayerContext, dtype: DataType, len: usize) -> Result<DevicePtr> {
                let address = self.expect(what, context, dtype, len)?;
                if len > 0 {
                    expect_pointers(&[(what, address, dtype.bytes() as u64)])?;
                }
                Ok(address)
            }
        }
    )*};
}

memory!(DeviceSlice<'_>, DeviceSliceMut<'_>);

/// Returns the address of optional memory, or null.
///
/// # Errors
/// As of [`Memory::at`].
pub fn at_if(
    memory: Option<&impl Memory>,
    what: &'static str,
    context: &LayerContext,
    dtype: DataType,
    len: usize,
) -> Result<DevicePtr> {
    memory.map_or(Ok(0), |memory| memory.at(what, context, dtype, len))
}

/// Returns an error for a dimension that is not a multiple.
///
/// # Errors
/// [`Error::Multiple`].
pub fn expect_multiple(what: &'static str, found: usize, multiple: usize) -> Result<()> {
    if found.is_multiple_of(multiple) { Ok(()) } else { Err(Error::Multiple { what, multiple, found }) }
}

/// Returns an error for a dimension that is zero or too large.
///
/// # Errors
/// [`Error::Dimension`].
pub fn expect_dimension(what: &'static str, size: usize, most: usize) -> Result<()> {
    if (1..=most).contains(&size) { Ok(()) } else { Err(Error::Dimension { what, size, most }) }
}

/// Returns an error for a pointer that is null or not aligned. Items are names, addresses and alignments.
///
/// # Errors
/// [`Error::Pointer`].
pub fn expect_pointers(pointers: &[(&'static str, DevicePtr, u64)]) -> Result<()> {
    for &(what, address, alignment) in pointers {
        if address == 0 || !address.is_multiple_of(alignment) {
            return Err(Error::Pointer { what, address, alignment });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_aligned_out_of_range_or_null_is_named() {
        assert!(expect_multiple("rows", 128, 64).is_ok());
        assert!(matches!(
            expect_multiple("rows", 96, 64),
            Err(Error::Multiple { what: "rows", multiple: 64, found: 96 })
        ));
        assert!(expect_dimension("tokens", 64, 64).is_ok());
        for size in [0, 65] {
            let found = expect_dimension("tokens", size, 64);
            assert!(matches!(found, Err(Error::Dimension { size: found, .. }) if found == size));
        }
        assert!(expect_pointers(&[("X", 32, 16), ("bias", 2, 2)]).is_ok());
        for address in [0, 24] {
            let error = expect_pointers(&[("X", 32, 16), ("values", address, 16)]).unwrap_err();
            assert!(matches!(error, Error::Pointer { what: "values", .. }));
        }
    }
}
