//! Headers that several kernels' sources share, those of other crates included. Sources have no `#include`: their modules list the files in order.

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
    /// Epilogues and stores.
    EPILOGUE = "epilogue.cuh";
    /// Instructions of Hopper: TMA, barriers, clusters.
    HOPPER = "hopper.cuh";
    /// The tile scheduler.
    PANELS = "panels.cuh";
    /// `mma.sp`.
    SPARSE_PRODUCT = "sparse_product.cuh";
    /// Shared parts of kernels whose weight goes straight into registers.
    DIRECT = "direct.cuh";
    /// Shared parts of kernels with a pipeline for each warp.
    RINGS = "rings.cuh";
    /// Shared parts of kernels with clusters and split-K.
    STREAM = "stream.cuh";
    /// int4 weights.
    INT4 = "int4.cuh";
    /// Tensor maps of int4 weights.
    MAPS_INT4 = "maps_int4.cuh";
}
