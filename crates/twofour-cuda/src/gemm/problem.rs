//! Problems: what is to be multiplied, and where it is.

use serde::{Deserialize, Serialize};
use twofour::layout::sm90::TileK;

use crate::{
    Architecture, DataType, DevicePtr, Error, Result,
    arguments::{expect_dimension, expect_multiple},
    prune::{MetaOrder, Packed},
};

/// What is to be multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Problem {
    /// What W and X are made of.
    pub element: DataType,
    /// What the result and the bias are made of.
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
    /// `[reduction, tokens]`: for the gradient of a weight, whose reduction is over the tokens of a layer. For f16 and bf16 on Hopper. The reduction may then be any
    /// number; the weight has groups of zeros up to the next multiple of 64 columns, as [`crate::compress`] makes them.
    ReductionFirst,
}

/// Where the tensors are.
#[derive(Debug, Clone, Copy)]
pub struct Operands {
    /// W, compressed, with metadata in [`super::Gemm::meta_order`].
    pub weight: Packed,
    /// X.
    pub x: DevicePtr,
    /// The result.
    pub out: DevicePtr,
}

/// Which results there are of which elements.
pub(super) const TYPES: &[(DataType, &[DataType])] = &[
    (DataType::F16, &[DataType::F16, DataType::F32]),
    (DataType::BF16, &[DataType::BF16, DataType::F32]),
    (DataType::E4M3, &[DataType::BF16, DataType::F16, DataType::F32]),
    (DataType::E5M2, &[DataType::BF16, DataType::F16, DataType::F32]),
    (DataType::I8, &[DataType::BF16, DataType::F16, DataType::I32]),
];

impl Problem {
    /// As layers have it: X is `[tokens, reduction]`, the result `[tokens, features]` and the sums themselves.
    pub fn plain(element: DataType, output: DataType, features: usize, tokens: usize, reduction: usize) -> Self {
        let (x, order) = (XOrder::TokensFirst, Order::TokensFirst);
        Self { element, output, features, tokens, reduction, x, order, epilogue: false }
    }

    /// Whether kernels know the types and the shape.
    pub(crate) fn expect_known(self) -> Result<()> {
        let Problem { element, output, features, tokens, reduction, x, epilogue, .. } = self;
        let known = TYPES.iter().any(|(e, outputs)| *e == element && outputs.contains(&output));
        if !known || epilogue && output == DataType::I32 {
            return Err(Error::Product { element, output, epilogue });
        }
        for (what, size) in [("features", features), ("tokens", tokens), ("reduction", reduction)] {
            expect_dimension(what, size, MOST)?;
        }
        expect_multiple("features of the product", features, 64)?;
        match x {
            XOrder::TokensFirst => expect_multiple("reduction of the product", reduction, tile_k(element).columns()),
            XOrder::ReductionFirst if element.bytes() == 2 && !epilogue => {
                expect_multiple("tokens of the product", tokens, 8)
            }
            XOrder::ReductionFirst => Err(Error::XOrder { element, epilogue }),
        }
    }
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
pub(super) fn tile_k(element: DataType) -> TileK {
    if element.bytes() == 2 { TileK::K64 } else { TileK::K128 }
}

/// Whether there is `wgmma.sp`.
pub(super) fn is_hopper(architecture: Architecture) -> bool {
    architecture.capability() == (9, 0)
}
