//! Problems: what is to be multiplied, and where it is.

use serde::{Deserialize, Serialize};
use twofour::layout::sm90::TileK;

use crate::{
    Architecture, DataType, DevicePtr, Error, Result,
    arguments::expect_dimension,
    prune::{MetaOrder, Packed},
};

/// What is to be multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GemmProblem {
    /// What W is made of.
    pub element: DataType,
    /// What X is made of: `element`, or of the two 8-bit floats the other one.
    pub x_element: DataType,
    /// What the result and the biases are made of.
    pub output: DataType,
    /// Rows of W.
    pub features: usize,
    /// Rows of X: of a batch `[batch, tokens, reduction]` that lies in one piece, `batch * tokens`.
    pub tokens: usize,
    /// Columns of both.
    pub reduction: usize,
    /// Which of X's axes is contiguous.
    pub x: XOrder,
    /// Which of the result's axes is contiguous.
    pub order: Order,
    /// Whether accumulators are scaled, biased or activated before they are stored ([`super::Epilogue`]): a kernel of its own.
    pub epilogue: bool,
    /// Whether the result is added to what is there, `out += result`: each result is rounded to the output's type, and then the sum is. As every result is added once, the same operands give the
    /// same bits.
    #[serde(default)]
    pub accumulate: bool,
}

/// Which of the result's axes is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Order {
    /// `[tokens, features]`, as layers have it.
    TokensFirst,
    /// `[features, tokens]`.
    FeaturesFirst,
}

/// Which of X's axes is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum XOrder {
    /// `[tokens, reduction]`, as layers have it.
    TokensFirst,
    /// `[reduction, tokens]`: for the gradient of a weight, whose reduction is over the tokens of a layer. Kernels read f16 and bf16 that way, on Hopper and without an epilogue; otherwise
    /// X is transposed into the workspace first.
    ReductionFirst,
}

/// Where the tensors are.
#[derive(Debug, Clone, Copy)]
pub struct GemmOperands {
    /// W, compressed, with metadata in [`super::Gemm::meta_order`].
    pub weight: Packed,
    /// X: aligned to its elements.
    pub x: DevicePtr,
    /// The result: aligned to its elements.
    pub out: DevicePtr,
    /// Memory for copies of what a kernel cannot take as it is, aligned to 16 bytes: [`super::Gemm::workspace_bytes`], or [`super::Gemm::unaligned_workspace_bytes`] where X or the result is
    /// not aligned to 16 bytes. Null where that is 0.
    pub workspace: DevicePtr,
}

/// Which results there are of which elements.
pub(super) const TYPES: &[(DataType, &[DataType])] = &[
    (DataType::F16, &[DataType::F16, DataType::F32]),
    (DataType::BF16, &[DataType::BF16, DataType::F32]),
    (DataType::E4M3, &[DataType::BF16, DataType::F16, DataType::F32]),
    (DataType::E5M2, &[DataType::BF16, DataType::F16, DataType::F32]),
    (DataType::I8, &[DataType::BF16, DataType::F16, DataType::I32]),
];

impl GemmProblem {
    /// As layers have it: X is `[tokens, reduction]`, the result `[tokens, features]` and the sums themselves.
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

    /// Refuses types that no kernel has, and dimensions beyond what kernels count.
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

    /// Whether W and X are of different types.
    pub(crate) fn is_mixed(self) -> bool {
        self.x_element != self.element
    }

    /// As kernels of an architecture compute it: they read only some X with the reduction first, and others after they were transposed.
    pub(super) fn computed(self, architecture: Architecture) -> GemmProblem {
        let read = is_hopper(architecture) && self.element.bytes() == 2 && !self.epilogue;
        if read { self } else { GemmProblem { x: XOrder::TokensFirst, ..self } }
    }

    /// Rows and columns of W, padding included.
    pub(super) fn padded(self) -> (usize, usize) {
        MetaOrder::Sm90(tile_k(self.element)).padded(self.features, self.reduction)
    }

    /// Elements of a row of X that TMA can copy: rows are multiples of 16 bytes. What lies beyond the reduction is read as zeros.
    pub(super) fn x_row_by_tma(self) -> usize {
        let row = match self.x {
            XOrder::TokensFirst => self.reduction,
            XOrder::ReductionFirst => self.tokens,
        };
        row.next_multiple_of(16 / self.element.bytes())
    }
}

/// Elements of W and of X that there are kernels for.
pub(super) fn elements() -> Vec<(DataType, DataType)> {
    let same = TYPES.iter().map(|(element, _)| (*element, *element));
    same.chain([(DataType::E4M3, DataType::E5M2), (DataType::E5M2, DataType::E4M3)]).collect()
}

/// The elements of W and of X in the name of a kernel.
pub(super) fn elements_name(element: DataType, x_element: DataType) -> String {
    if element == x_element { element.to_string() } else { format!("{element}x{x_element}") }
}

/// Whether an element type is an 8-bit float.
fn is_float_8(element: DataType) -> bool {
    matches!(element, DataType::E4M3 | DataType::E5M2)
}

/// Bytes of a compressed weight on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedBytes {
    /// Of the values.
    pub values: usize,
    /// Of the metadata.
    pub meta: usize,
}

impl PackedBytes {
    /// Of both.
    pub fn total(self) -> usize {
        self.values.saturating_add(self.meta)
    }
}

/// Bytes that a compressed weight `[features, reduction]` takes in the order of products ([`super::Gemm::meta_order_of`]), padding included: rows are padded to a multiple of
/// 64, columns to one of 64 for 16-bit elements and of 128 for 8-bit ones.
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

/// The largest dimension that kernels count.
pub(super) const MOST: usize = (1 << 30) - 1;

/// The step that metadata is ordered for.
pub(crate) fn tile_k(element: DataType) -> TileK {
    if element.bytes() == 2 { TileK::K64 } else { TileK::K128 }
}

/// Whether there is `wgmma.sp`.
pub(super) fn is_hopper(architecture: Architecture) -> bool {
    architecture.capability() == (9, 0)
}
