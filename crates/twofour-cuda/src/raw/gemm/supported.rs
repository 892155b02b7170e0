//! Which problems the kernels compute, and how: data types, limits and padding.

use super::tile_k;
use crate::{
    Architecture, DataType, Error, Result,
    arguments::expect_dimension,
    problem::{GemmProblem, XOrder},
    raw::MetaOrder,
    source::Support,
};

/// What kernels whose warps each have a pipeline of TMA copies require of an architecture.
pub(super) const WARP_PIPELINES: Support = Support::WGMMA;

/// Output types of each element type.
pub(super) const TYPES: &[(DataType, &[DataType])] = &[
    (DataType::F16, &[DataType::F16, DataType::F32]),
    (DataType::BF16, &[DataType::BF16, DataType::F32]),
    (DataType::E4M3, &[DataType::BF16, DataType::F16, DataType::F32]),
    (DataType::E5M2, &[DataType::BF16, DataType::F16, DataType::F32]),
    (DataType::I8, &[DataType::BF16, DataType::F16, DataType::I32]),
];

impl GemmProblem {
    /// Returns an error for data types that no kernel has, and for dimensions that are 0 or larger than kernels
    /// support.
    pub(crate) fn expect_known(self) -> Result<()> {
        let GemmProblem { element, x_element, output, features, tokens, reduction, epilogue, .. } = self;
        let known = TYPES.iter().any(|(e, outputs)| *e == element && outputs.contains(&output));
        if !known || epilogue.is_some() && output == DataType::I32 {
            return Err(Error::Product { element, output, epilogue: epilogue.is_some() });
        }
        if x_element != element && !(is_float_8(element) && is_float_8(x_element)) {
            return Err(Error::MixedElements { element, x_element });
        }
        for (what, size) in [("features", features), ("tokens", tokens), ("reduction", reduction)] {
            expect_dimension(what, size, MAX_GEMM_DIMENSION)?;
        }
        Ok(())
    }

    /// Returns the problem that the architecture's kernels compute. They read X as `[reduction, tokens]` only for some
    /// problems; for others X is transposed first.
    pub(super) fn computed(self, architecture: Architecture) -> GemmProblem {
        let read = architecture.features().wgmma && self.element.bytes() == 2 && self.epilogue.is_none();
        if read { self } else { GemmProblem { x: XOrder::TokensFirst, ..self } }
    }

    /// Returns the rows and columns of W, padding included.
    pub(super) fn padded(self) -> (usize, usize) {
        MetaOrder::Sm90(tile_k(self.element)).padded(self.features, self.reduction)
    }

    /// Returns the elements of a row of X, rounded up to a multiple of 16 bytes as TMA requires. Elements beyond the
    /// reduction are read as zeros.
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

/// The largest dimension that kernels support.
pub(super) const MAX_GEMM_DIMENSION: usize = (1 << 30) - 1;
