//! A weight in device memory, dense or compressed.

use twofour::layout::sm90::TileK;

use crate::{DataType, DevicePtr};

/// A dense weight in device memory, `[rows, cols]` row-major.
#[derive(Debug, Clone, Copy)]
pub struct DenseWeight {
    /// Its address.
    pub data: DevicePtr,
    /// Rows: `out_features`.
    pub rows: usize,
    /// Columns: `in_features`.
    pub cols: usize,
}

impl DenseWeight {
    /// Returns whether every run of `elements` elements of a row, counted from the row's start, is aligned to its size
    /// in bytes.
    pub(crate) fn is_aligned(self, element: DataType, elements: usize) -> bool {
        self.cols.is_multiple_of(elements) && self.data.is_multiple_of((elements * element.bytes()) as u64)
    }
}

/// The order of metadata, and the padding of a compressed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetaOrder {
    /// The order on disk: `[rows, ceil(cols / 32)]` u32s, beside `[rows, 2 * ceil(cols / 4)]` values. Codes of groups
    /// past the end of a row are 0.
    Canonical,
    /// The order of GEMM kernels ([`crate::raw::gemm`]): that of [`twofour::layout::sm90::encode_16`] and `encode_8`.
    /// The weight is padded: rows to a multiple of 64, columns to a multiple of the tile's. The padding has values of
    /// zero and valid codes. Values are `[padded rows, padded columns / 2]`, metadata takes `padded rows * padded
    /// columns / 8` bytes; [`crate::raw::gemm::packed_bytes`] returns both in bytes.
    Sm90(TileK),
}

impl MetaOrder {
    /// Returns the rows and columns of a compressed weight in this order, padding included; at most [`usize::MAX`].
    pub fn padded(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            MetaOrder::Canonical => (rows, cols),
            MetaOrder::Sm90(tile) => {
                let padded = |n: usize, multiple| n.checked_next_multiple_of(multiple).unwrap_or(usize::MAX);
                (padded(rows, 64), padded(cols, tile.columns()))
            }
        }
    }
}

/// The device pointers of a compressed weight: values and metadata, in the sizes of [`MetaOrder`]; both aligned to 16
/// bytes.
#[derive(Debug, Clone, Copy)]
pub struct Packed {
    /// The values.
    pub values: DevicePtr,
    /// The metadata.
    pub meta: DevicePtr,
}

/// The metadata of a compressed weight, in the kernels' memory layout.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RawMeta {
    words: DevicePtr,
    order: u32,
}

impl RawMeta {
    pub(super) fn new(words: DevicePtr, order: MetaOrder) -> Self {
        let order = match order {
            MetaOrder::Canonical => 0,
            MetaOrder::Sm90(tile) => tile.columns() as u32,
        };
        Self { words, order }
    }

    /// No metadata, for forms that are not written.
    pub(super) const NONE: Self = Self { words: 0, order: 0 };
}
