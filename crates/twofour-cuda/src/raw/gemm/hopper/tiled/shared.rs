//! What each part of a kernel takes of shared memory.

use crate::DataType as Element;

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
