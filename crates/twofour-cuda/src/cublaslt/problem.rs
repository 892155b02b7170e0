//! Dense GEMMs: shapes, epilogues and partial sums.

use crate::DataType;

/// A dense GEMM, `D = op(A) op(B)` in column-major terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DenseProblem {
    /// Data type of A and B.
    pub element: DataType,
    /// Data type of D.
    pub output: DataType,
    /// Rows of D.
    pub rows: usize,
    /// Columns of D.
    pub cols: usize,
    /// The `k` dimension.
    pub reduction: usize,
    /// Whether A is `[rows, reduction]` row-major, that is, transposed column-major; otherwise column-major.
    pub a_transposed: bool,
    /// Whether B is `[reduction, cols]` row-major; otherwise column-major.
    pub b_transposed: bool,
    /// Whether the result is added to D.
    pub accumulate: bool,
}

/// An epilogue of a dense GEMM with a vector of D's data type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DenseEpilogue {
    /// Adds the vector, one value for each row of D, to every column.
    Bias,
    /// Writes the sums of op(B) over the reduction to the vector, one value for each column of D: in a weight
    /// gradient's GEMM, the bias gradient.
    BiasGradient,
}

impl DenseEpilogue {
    /// Returns the library's number of the epilogue.
    pub(super) fn number(self) -> u32 {
        match self {
            DenseEpilogue::Bias => 4,
            DenseEpilogue::BiasGradient => 512,
        }
    }
}

/// The data type in which a dense GEMM with split-K may add partial sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartialSums {
    /// Any type, including D's: the fastest choice of the library.
    Any,
    /// f32 (i32 for integers), so that a result is rounded once.
    Wide,
}

impl PartialSums {
    /// Returns the library's mask of reduction schemes: in place 1, in the compute type 2, in the output's type 4.
    pub(super) fn mask(self) -> u32 {
        match self {
            PartialSums::Any => 7,
            PartialSums::Wide => 2,
        }
    }
}
