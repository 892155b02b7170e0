//! Shared memory of a CTA: what there is, and what each part of a kernel takes.

use crate::{Architecture, DataType as Element};

/// Shared memory that a CTA can have on sm_90.
pub(in crate::raw::gemm) const SHARED_BYTES: u32 = Architecture::SM_90.shared_bytes();

/// Returns the shared memory that each of `blocks` CTAs resident on an SM can have. The SM reserves 1024 bytes for each; with one CTA they are
/// already subtracted from [`SHARED_BYTES`].
pub(in crate::raw::gemm) const fn shared_bytes_of_each(blocks: u32) -> u32 {
    (SHARED_BYTES + 1024) / blocks - 1024
}

/// Bytes reserved to align the start of shared memory.
pub(super) const ALIGNMENT: u32 = 1024;

/// Bytes of the barrier that counts the accumulators received from other CTAs.
pub(super) const RECEIVED_BARRIER: u32 = 8;

/// Bytes of a stage: values of W, X, metadata and two barriers.
pub(super) const fn stage_bytes(element: Element, features: u32, tokens: u32, atoms: u32) -> u32 {
    atoms * (features * 64 + tokens * 128 + features * (128 / element.bytes() as u32) / 8) + 16
}

/// Bytes of a warpgroup's staging buffers for results stored by TMA.
pub(super) const fn staging_bytes(chunk: u32) -> u32 {
    3 * chunk * 128
}

/// Bytes of a warpgroup's accumulators that go through shared memory of their own, where TMA does not store results.
pub(super) const fn accumulator_bytes(chunk: u32) -> u32 {
    chunk * 64 * 4
}
