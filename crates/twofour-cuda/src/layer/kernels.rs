//! The kernels and planned GEMMs of a context, which the first call loads.

use super::LayerContext;
use crate::{
    DataType, Result,
    problem::{GemmProblem, Int4Problem},
    raw::{
        block_sparse::BlockSparseProduct,
        column_sums::ColumnSums,
        compress::Compressor,
        dequantize::Dequantizer,
        elementwise::Elementwise,
        estimate::DenseEstimator,
        gemm::{Gemm, copies::Copies, int4::Int4Gemm},
        mask_changes::MaskChanges,
        prune::Pruner,
        quantize::Quantizer,
        unpack::Unpacker,
    },
};

/// Methods of a context that return kernels, which the first call loads.
macro_rules! loaded {
    ($($(#[$about:meta])* $visibility:vis $name:ident($($key:ident: $type:ty),*) -> $kernels:ident;)*) => {$(
        $(#[$about])*
        $visibility fn $name(&self, $($key: $type),*) -> Result<$kernels> {
            self.kernels(($($key,)*), |device| $kernels::new(device, $($key),*))
        }
    )*};
}

impl LayerContext {
    /// Returns the GEMM for a problem.
    pub(super) fn gemm(&self, problem: GemmProblem) -> Result<Gemm> {
        self.plans().of(problem, || {
            self.expect_not_capturing("planning a GEMM")?;
            Gemm::new(self.device(), problem)
        })
    }

    loaded! {
        pub(super) pruner(input: DataType, output: DataType) -> Pruner;
        pub(super) compressor(input: DataType, output: DataType) -> Compressor;
        pub(super) unpacker(dtype: DataType) -> Unpacker;
        pub(super) dequantizer(dtype: DataType) -> Dequantizer;
        pub(super) block_sparse(dtype: DataType, block: usize) -> BlockSparseProduct;
        pub(super) estimator(dtype: DataType) -> DenseEstimator;
        /// Returns the element-wise passes of a data type.
        ///
        /// # Errors
        /// Those of [`Elementwise::new`]; [`crate::Error::Capturing`].
        pub elementwise(dtype: DataType) -> Elementwise;
        /// Returns the sums of columns of a data type.
        ///
        /// # Errors
        /// Those of [`ColumnSums::new`]; [`crate::Error::Capturing`].
        pub column_sums(dtype: DataType) -> ColumnSums;
        /// Returns the quantization of a data type.
        ///
        /// # Errors
        /// Those of [`Quantizer::new`]; [`crate::Error::Capturing`].
        pub quantizer(dtype: DataType) -> Quantizer;
        /// Returns the GEMM with an int4 weight for a problem.
        pub(super) int4(problem: Int4Problem) -> Int4Gemm;
        /// Returns the kernels that copy rows.
        pub(super) copies() -> Copies;
        /// Returns the kernel that reads the mask changes of several layers.
        pub(crate) mask_change_counters() -> MaskChanges;
    }
}
