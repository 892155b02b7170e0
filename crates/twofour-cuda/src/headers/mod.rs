//! Headers that the sources of several kernels share. Sources have no includes: their modules name what they need, in order.

use crate::source::File;

macro_rules! headers {
    ($($(#[$doc:meta])* $constant:ident = $file:literal;)*) => {
        $($(#[$doc])* pub(crate) const $constant: File = File::new($file, include_str!($file));)*
    };
}

headers! {
    /// Types and conversions.
    COMMON = "common.cuh";
    /// Codes of metadata, and how they are ordered.
    CODES = "codes.cuh";
    /// Operations on two numbers side by side.
    PAIRS = "pairs.cuh";
    /// A block of metadata in shared memory.
    META_BLOCK = "meta_block.cuh";
    /// Estimators of groups.
    ESTIMATE = "estimate.cuh";
    /// Scales, bias and activation, and how results are stored.
    EPILOGUE = "epilogue.cuh";
    /// Instructions of Hopper: TMA, barriers, clusters.
    HOPPER = "hopper.cuh";
    /// The order of tiles.
    PANELS = "panels.cuh";
    /// `mma.sp`.
    SPARSE_PRODUCT = "sparse_product.cuh";
    /// Kernels whose weight goes straight into registers.
    DIRECT = "direct.cuh";
    /// Kernels each of whose warps has a pipeline of its own.
    RINGS = "rings.cuh";
    /// Kernels by clusters.
    STREAM = "stream.cuh";
    /// int4 weights.
    INT4 = "int4.cuh";
    /// Tensor maps of int4 weights.
    MAPS_INT4 = "maps_int4.cuh";
}
