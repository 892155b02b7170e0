//! The device pointers of a GEMM, and the bytes of a compressed weight.

use twofour::layout::sm90::TileK;

use crate::{
    DataType, DevicePtr,
    raw::{MetaOrder, Packed},
};

/// The device pointers of a call.
#[derive(Debug, Clone, Copy)]
pub struct GemmOperands {
    /// W, compressed, with metadata in [`super::Gemm::meta_order`].
    pub weight: Packed,
    /// X: aligned to its elements.
    pub x: DevicePtr,
    /// The result: aligned to its elements.
    pub out: DevicePtr,
    /// Memory for copies of operands that a kernel cannot read or write in place, aligned to 16 bytes. It has
    /// [`super::Gemm::workspace_bytes`] bytes, or [`super::Gemm::unaligned_workspace_bytes`] where X or the result is
    /// not aligned to 16 bytes. Null where that is 0.
    pub workspace: DevicePtr,
}

/// Bytes of a compressed weight on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedBytes {
    /// Bytes of the values.
    pub values: usize,
    /// Bytes of the metadata.
    pub meta: usize,
}

impl PackedBytes {
    /// Returns the sum of both.
    pub fn total(self) -> usize {
        self.values.saturating_add(self.meta)
    }
}

/// Returns the bytes of a compressed weight `[features, reduction]` in the GEMMs' order
/// ([`super::Gemm::meta_order_of`]), padding included. Rows are padded to a multiple of 64, columns to a multiple of 64
/// for 16-bit elements and of 128 for 8-bit ones.
///
/// ```
/// use twofour_cuda::{DataType, raw::gemm::packed_bytes};
/// let bytes = packed_bytes(DataType::BF16, 100, 70);
/// assert_eq!((bytes.values, bytes.meta), (128 * 128 / 2 * 2, 128 * 128 / 8));
/// ```
pub fn packed_bytes(element: DataType, features: usize, reduction: usize) -> PackedBytes {
    let (rows, cols) = MetaOrder::Sm90(tile_k(element)).padded(features, reduction);
    let elements = rows.saturating_mul(cols);
    PackedBytes { values: (elements / 2).saturating_mul(element.bytes()), meta: elements / 8 }
}

/// Returns the `k` extent that metadata is ordered for.
pub(crate) fn tile_k(element: DataType) -> TileK {
    if element.bytes() == 2 { TileK::K64 } else { TileK::K128 }
}
