//! The memory of packed weights.

use twofour::kernel::PACKED_ALIGNMENT as ALIGNMENT;

use crate::torch::{Result, Tensor};

/// Bytes at an address that kernels can load from: a copy where a packed weight is not aligned, as after loading from a
/// file.
pub(crate) enum Memory<'a> {
    Borrowed(&'a [u8]),
    Copied { buffer: Vec<u8>, start: usize, len: usize },
}

impl<'a> Memory<'a> {
    /// The memory of a packed weight.
    ///
    /// # Errors
    /// A `RuntimeError` where it is not contiguous.
    pub(crate) fn of(packed: &'a Tensor) -> Result<Self> {
        let bytes = packed.bytes("the packed weight")?;
        if bytes.is_empty() || bytes.as_ptr().addr().is_multiple_of(ALIGNMENT) {
            return Ok(Memory::Borrowed(bytes));
        }
        let mut buffer = vec![0; bytes.len() + ALIGNMENT];
        let start = buffer.as_ptr().addr().wrapping_neg() % ALIGNMENT;
        buffer[start..][..bytes.len()].copy_from_slice(bytes);
        Ok(Memory::Copied { buffer, start, len: bytes.len() })
    }
}

impl std::ops::Deref for Memory<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Memory::Borrowed(bytes) => bytes,
            Memory::Copied { buffer, start, len } => &buffer[*start..][..*len],
        }
    }
}
