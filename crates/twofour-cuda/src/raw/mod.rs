//! Kernels over raw device pointers.
//!
//! Calls take device pointers ([`DevicePtr`](crate::DevicePtr)) and a stream, so that any framework can call them. They
//! are `unsafe`: a pointer is checked for null and alignment, but not for the length of the memory that it points to,
//! nor for its device. Each call's `# Safety` section says what must hold. [`crate::layer`] makes the same calls over
//! length-checked device memory.
//!
//! | task | module |
//! |---|---|
//! | a weight in device memory, dense or compressed | [`DenseWeight`], [`Packed`], [`MetaOrder`] |
//! | pruning a weight: mask, compressed weight and compressed transpose | [`prune`] |
//! | compressing a tensor along one axis | [`compress`] |
//! | decompressing a packed weight | [`unpack`] |
//! | products with a weight in square blocks | [`block_sparse`] |
//! | the scale of a soft threshold | [`soft_threshold`] |
//! | 2:4 estimates as dense matrices | [`estimate`] |
//! | quantization to 8 bits | [`quantize`] |
//! | GEMM with a compressed weight | [`gemm`] |
//! | element-wise activations and their gradients | [`elementwise`] |
//! | column sums: bias gradients | [`column_sums`] |
//! | an AdamW step | [`adamw`] |
//! | what sources and launches share | [`headers`], [`float_types`], [`grid`] |
//!
//! Each kernel's CUDA source is beside its module. Loading a kernel compiles it, or reads its machine code from the
//! cache; a call launches it and returns.

pub mod adamw;
pub mod block_sparse;
pub mod column_sums;
pub mod compress;
pub mod dequantize;
pub mod elementwise;
pub mod estimate;
pub mod float_types;
pub mod gemm;
pub mod grid;
pub mod headers;
pub(crate) mod mask_changes;
pub mod prune;
pub mod quantize;
pub mod soft_threshold;
pub(crate) mod solve;
pub mod unpack;
mod weight;

pub use weight::{DenseWeight, MetaOrder, Packed};

use self::float_types::FloatSource;
use crate::source::Source;

/// Returns the source of every kernel.
pub(crate) fn sources() -> Vec<Source> {
    let weights = prune::sources().into_iter().chain(compress::sources()).chain(unpack::sources());
    let weights = weights.chain(dequantize::sources()).chain(block_sparse::sources());
    let floats = [soft_threshold::SOURCE, estimate::SOURCE, quantize::SOURCE, elementwise::SOURCE, column_sums::SOURCE];
    let others =
        weights.chain(adamw::sources()).chain([mask_changes::source(), solve::source()]).chain(gemm::sources());
    floats.iter().flat_map(FloatSource::all).chain(others).collect()
}
