//! GEMM problems: shapes, data types and memory orders, and the pointers of a call.

use serde::{Deserialize, Serialize};
use twofour::layout::sm90::TileK;

use crate::{
    Architecture, DataType, DevicePtr, Error, Result,
    arguments::expect_dimension,
    prune::{MetaOrder, Packed},
};

/// The shape, data types and memory orders of a GEMM. For the tensor-core instructions `m` is `features`, `n` is `tokens` and `k` is `reduction`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GemmProblem {
    /// Data type of W.
    pub element: DataType,
    /// Data type of X: `element`, or the other one of the two 8-bit floats.
    pub x_element: DataType,
    /// Data type of the result and the biases.
    pub output: DataType,
    /// Rows of W: `out_features` of a layer.
    pub features: usize,
    /// Rows of X. For a contiguous batch `[batch, tokens, reduction]` this is `batch * tokens`.
    pub tokens: usize,
    /// Columns of W and X: `in_features` of a layer.
    pub reduction: usize,
    /// Which of X's axes is contiguous.
    pub x: XOrder,
    /// Which of the result's axes is contiguous.
    pub order: Order,
    /// Whether the kernel has an epilogue ([`super::Epilogue`]): scales, bias and activation.
    pub epilogue: bool,
    /// Whether the result is added to the output, `out += result`. The result is rounded to the output's type, and then the sum is. Every element is
    /// added exactly once, so the same operands give the same bits.
    #[serde(default)]
    pub accumulate: bool,
}

/// Which of the result's axes is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Order {
    /// `[tokens, features]`, the order of a layer's output.
    TokensFirst,
    /// `[features, tokens]`.
    FeaturesFirst,
}

/// Which of X's axes is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum XOrder {
    /// `[tokens, reduction]`, the order of a layer's input.
    TokensFirst,
    /// `[reduction, tokens]`: for a weight gradient, whose reduction runs over a layer's tokens. Kernels read f16 and bf16 in this order on Hopper,
    /// without an epilogue. Otherwise X is first transposed into the workspace.
    ReductionFirst,
}

/// The device pointers of a call.
#[derive(Debug, Clone, Copy)]
pub struct GemmOperands {
    /// W, compressed, with metadata in [`super::Gemm::meta_order`].
    pub weight: Packed,
    /// X: aligned to its elements.
    pub x: DevicePtr,
    /// The result: aligned to its elements.
    pub out: DevicePtr,
    /// Memory for copies of operands that a kernel cannot read or write in place, aligned to 16 bytes. It has [`super::Gemm::workspace_bytes`] bytes,
    /// or [`super::Gemm::unaligned_workspace_bytes`] where X or the result is not aligned to 16 bytes. Null where that is 0.
    pub workspace: DevicePtr,
}

/// Output types of each element type.
pub(super) const TYPES: &[(DataType, &[DataType])] = &[
    (DataType::F16, &[DataType::F16, DataType::F32]),
    (DataType::BF16, &[DataType::BF16, DataType::F32]),
    (DataType::E4M3, &[DataType::BF16, DataType::F16, DataType::F32]),
    (DataType::E5M2, &[DataType::BF16, DataType::F16, DataType::F32]),
    (DataType::I8, &[DataType::BF16, DataType::F16, DataType::I32]),
];

impl GemmProblem {
    /// Returns a problem with X `[tokens, reduction]` and the result `[tokens, features]`, without an epilogue.
    pub fn plain(element: DataType, output: DataType, features: usize, tokens: usize, reduction: usize) -> Self {
        let (x, order) = (XOrder::TokensFirst, Order::TokensFirst);
        Self {
            element,
            x_element: element,
            output,
            features,
            tokens,
            reduction,
            x,
            order,
            epilogue: false,
            accumulate: false,
        }
    }

    /// Returns an error for data types that no kernel has, and for dimensions that are 0 or larger than kernels support.
    pub(crate) fn expect_known(self) -> Result<()> {
        let GemmProblem { element, x_element, output, features, tokens, reduction, epilogue, .. } = self;
        let known = TYPES.iter().any(|(e, outputs)| *e == element && outputs.contains(&output));
        if !known || epilogue && output == DataType::I32 {
            return Err(Error::Product { element, output, epilogue });
        }
        if x_element != element && !(is_float_8(element) && is_float_8(x_element)) {
            return Err(Error::MixedElements { element, x_element });
        }
        for (what, size) in [("features", features), ("tokens", tokens), ("reduction", reduction)] {
            expect_dimension(what, size, MOST)?;
        }
        Ok(())
    }

    /// Returns whether W and X have different data types.
    pub(crate) fn is_mixed(self) -> bool {
        self.x_element != self.element
    }

    /// Returns the problem that the architecture's kernels compute. They read X as `[reduction, tokens]` only for some problems; for others X is transposed first.
    pub(super) fn computed(self, architecture: Architecture) -> GemmProblem {
        let read = is_hopper(architecture) && self.element.bytes() == 2 && !self.epilogue;
        if read { self } else { GemmProblem { x: XOrder::TokensFirst, ..self } }
    }

    /// Returns the rows and columns of W, padding included.
    pub(super) fn padded(self) -> (usize, usize) {
        MetaOrder::Sm90(tile_k(self.element)).padded(self.features, self.reduction)
    }

    /// Returns the elements of a row of X, rounded up to a multiple of 16 bytes as TMA requires. Elements beyond the reduction are read as zeros.
    pub(super) fn x_row_by_tma(self) -> usize {
        let row = match self.x {
            XOrder::TokensFirst => self.reduction,
            XOrder::ReductionFirst => self.tokens,
        };
        row.next_multiple_of(16 / self.element.bytes())
    }
}

/// Returns the pairs of data types of W and X that kernels support.
pub(super) fn elements() -> Vec<(DataType, DataType)> {
    let same = TYPES.iter().map(|(element, _)| (*element, *element));
    same.chain([(DataType::E4M3, DataType::E5M2), (DataType::E5M2, DataType::E4M3)]).collect()
}

/// Returns the data types of W and X as they stand in a kernel's name.
pub(super) fn elements_name(element: DataType, x_element: DataType) -> String {
    if element == x_element { element.to_string() } else { format!("{element}x{x_element}") }
}

/// Returns whether a data type is an 8-bit float.
fn is_float_8(element: DataType) -> bool {
    matches!(element, DataType::E4M3 | DataType::E5M2)
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

/// Returns the bytes of a compressed weight `[features, reduction]` in the GEMMs' order ([`super::Gemm::meta_order_of`]), padding included. Rows are
/// padded to a multiple of 64, columns to a multiple of 64 for 16-bit elements and of 128 for 8-bit ones.
///
/// ```
/// use twofour_cuda::{DataType, gemm::packed_bytes};
/// let bytes = packed_bytes(DataType::BF16, 100, 70);
/// assert_eq!((bytes.values, bytes.meta), (128 * 128 / 2 * 2, 128 * 128 / 8));
/// ```
pub fn packed_bytes(element: DataType, features: usize, reduction: usize) -> PackedBytes {
    let (rows, cols) = MetaOrder::Sm90(tile_k(element)).padded(features, reduction);
    let elements = rows.saturating_mul(cols);
    PackedBytes { values: (elements / 2).saturating_mul(element.bytes()), meta: elements / 8 }
}

/// The largest dimension that kernels support.
pub(super) const MOST: usize = (1 << 30) - 1;

/// Returns the `k` extent that metadata is ordered for.
pub(crate) fn tile_k(element: DataType) -> TileK {
    if element.bytes() == 2 { TileK::K64 } else { TileK::K128 }
}

/// Returns whether the architecture has `wgmma.sp`.
pub(super) fn is_hopper(architecture: Architecture) -> bool {
    architecture.capability() == (9, 0)
}
