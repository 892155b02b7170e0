//! Validation of arguments.

use crate::{DevicePtr, Error, Result};

/// Returns an error for a dimension that is not a multiple.
pub(crate) fn expect_multiple(what: &'static str, found: usize, multiple: usize) -> Result<()> {
    if found.is_multiple_of(multiple) { Ok(()) } else { Err(Error::Multiple { what, multiple, found }) }
}

/// Returns an error for a dimension that is zero or too large.
pub(crate) fn expect_dimension(what: &'static str, size: usize, most: usize) -> Result<()> {
    if (1..=most).contains(&size) { Ok(()) } else { Err(Error::Dimension { what, size, most }) }
}

/// Returns an error for a pointer that is null or not aligned. Items are names, addresses and alignments.
pub(crate) fn expect_pointers(pointers: &[(&'static str, DevicePtr, u64)]) -> Result<()> {
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
            assert!(
                matches!(expect_dimension("tokens", size, 64), Err(Error::Dimension { size: found, .. }) if found == size)
            );
        }
        assert!(expect_pointers(&[("X", 32, 16), ("bias", 2, 2)]).is_ok());
        for address in [0, 24] {
            let error = expect_pointers(&[("X", 32, 16), ("values", address, 16)]).unwrap_err();
            assert!(matches!(error, Error::Pointer { what: "values", .. }));
        }
    }
}
