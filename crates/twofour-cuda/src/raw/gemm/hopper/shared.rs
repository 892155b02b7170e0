//! Shared memory of a CTA.

use crate::Architecture;

/// Shared memory that a CTA can have on sm_90.
pub(super) const SHARED_BYTES: u32 = Architecture::SM_90.features().shared_bytes;

/// Returns the shared memory that each of `blocks` CTAs resident on an SM can have. The SM reserves 1024 bytes for
/// each; with one CTA they are already subtracted from [`SHARED_BYTES`].
pub(super) const fn shared_bytes_of_each(blocks: u32) -> u32 {
    (SHARED_BYTES + 1024) / blocks - 1024
}
