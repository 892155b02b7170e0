//! Memory that the system may refuse.
//!
//! Where a tensor's memory is refused, the answer is [`Error::OutOfMemory`]. Small allocations are Rust's ordinary
//! ones, which end the process.

use std::cell::Cell;

use bytemuck::Zeroable;

use crate::{Error, Result};

thread_local! {
    static IS_ATTEMPT: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is allocating memory whose refusal it reports as an error. A global allocator that ends the
/// process where memory is refused must return null to such an allocation.
pub fn is_attempt() -> bool {
    IS_ATTEMPT.get()
}

/// Marks the allocations of this thread as attempts while it lives.
struct Attempt;

impl Attempt {
    fn begin() -> Self {
        IS_ATTEMPT.set(true);
        Attempt
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        IS_ATTEMPT.set(false);
    }
}

/// `len` elements of zero bytes.
///
/// # Errors
/// [`Error::OutOfMemory`] where the system refuses them.
pub(crate) fn zeroed<T: Zeroable>(len: usize) -> Result<Vec<T>> {
    let _attempt = Attempt::begin();
    bytemuck::allocation::try_zeroed_vec(len)
        .map_err(|()| Error::OutOfMemory { bytes: len.saturating_mul(size_of::<T>()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beyond_the_address_space_is_an_error_with_its_bytes() {
        for len in [usize::MAX / 16, usize::MAX / 2, usize::MAX] {
            let error = zeroed::<u64>(len).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory { bytes } if bytes == len.saturating_mul(8)), "{error}");
            assert!(!is_attempt());
        }
        assert_eq!(zeroed::<u16>(3).unwrap(), [0; 3]);
    }
}
