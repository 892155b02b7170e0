//! Headers that kernels of several modules share, those of other crates included; those of the GEMMs are in
//! [`super::gemm`]. Sources have no `#include`: their modules list the files in order.

use crate::source::File;

macro_rules! headers {
    ($($(#[$doc:meta])* $constant:ident = $file:literal;)*) => {
        $($(#[$doc])* pub const $constant: File = File::new($file, include_str!($file));)*
    };
}

headers! {
    /// Types and conversions.
    COMMON = "common.cuh";
    /// Activations and their derivatives.
    FUNCTIONS = "functions.cuh";
    /// Rows that a CTA reads in vectors, and sums over a CTA.
    ROWS = "rows.cuh";
    /// The scale of a row of 8-bit integers.
    ROW_SCALE = "row_scale.cuh";
    /// Quantization of rows to 8-bit integers.
    QUANTIZED_ROW = "quantized_row.cuh";
    /// `mma`, `ldmatrix` and `cp.async`.
    DENSE_PRODUCT = "dense_product.cuh";
    /// Metadata codes and orders.
    CODES = "codes.cuh";
    /// Operations on pairs of numbers.
    PAIRS = "pairs.cuh";
    /// A CTA's metadata in shared memory.
    META_BLOCK = "meta_block.cuh";
    /// Estimators of groups.
    ESTIMATE = "estimate.cuh";
    /// Instructions of Hopper: TMA, barriers, clusters.
    HOPPER = "hopper.cuh";
}
