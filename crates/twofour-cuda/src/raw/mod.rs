//! Kernels and GEMM engines over raw device pointers.
//!
//! Calls take device pointers ([`DevicePtr`](crate::DevicePtr)) and a stream, so that any framework can call them. They are `unsafe`: a pointer is
//! checked for null and alignment, but not for the length of the memory that it points to, nor for its device. Each call's `# Safety` section says what
//! must hold. [`crate::layer`] makes the same calls over length-checked device memory.
//!
//! | task | module |
//! |---|---|
//! | a weight in device memory, dense or compressed | [`DenseWeight`], [`Packed`], [`MetaOrder`] |
//! | pruning a weight: mask, compressed weight and compressed transpose | [`prune`] |
//! | compressing a tensor along one axis | [`compress`] |
//! | decompressing a packed weight | [`unpack`] |
//! | the scale of a soft threshold | [`soft_threshold`] |
//! | 2:4 estimates as dense matrices | [`estimate`] |
//! | quantization to 8 bits | [`quantize`] |
//! | GEMM with a compressed weight | [`gemm`] |
//! | a GEMM by a given engine: these kernels, cuSPARSELt or cuBLASLt | [`engine`] |
//! | element-wise activations and their gradients | [`elementwise`] |
//! | column sums: bias gradients | [`column_sums`] |
//! | an AdamW step | [`adamw`] |
//!
//! Each kernel's CUDA source is beside its module. Loading a kernel compiles it, or reads its machine code from the cache; a call launches it and
//! returns.

pub mod adamw;
pub(crate) mod attention;
pub mod column_sums;
pub mod compress;
pub(crate) mod cross_entropy;
pub(crate) mod decode;
pub mod elementwise;
pub(crate) mod embedding;
pub mod engine;
pub mod estimate;
pub(crate) mod flips;
mod float_types;
pub(crate) mod gated;
pub mod gemm;
pub(crate) mod gradient_norm;
pub(crate) mod grid;
pub(crate) mod headers;
pub(crate) mod heads;
pub(crate) mod image;
pub(crate) mod keep_of_four;
pub(crate) mod masking;
pub(crate) mod norm;
pub(crate) mod pointwise;
pub mod prune;
pub mod quantize;
pub(crate) mod sgd;
pub mod soft_threshold;
pub(crate) mod softmax;
pub mod unpack;
mod weight;

use crate::source::Source;

pub use weight::{DenseWeight, MetaOrder, Packed};

/// Returns the sources of [`crate::transformer`]'s kernels.
fn transformer_sources() -> impl Iterator<Item = Source> {
    let rows = norm::sources().into_iter().chain(cross_entropy::sources()).chain(embedding::sources());
    let heads = keep_of_four::sources()
        .into_iter()
        .chain(masking::sources())
        .chain(heads::sources())
        .chain(image::sources())
        .chain(softmax::sources())
        .chain(attention::sources());
    let elements = gated::sources().into_iter().chain(pointwise::sources()).chain([
        gradient_norm::source(),
        sgd::source(),
        flips::source(),
    ]);
    rows.chain(heads).chain(elements)
}

/// Returns the source of every kernel.
pub(crate) fn sources() -> Vec<Source> {
    let weights = prune::sources().into_iter().chain(compress::sources()).chain(unpack::sources());
    let scales = soft_threshold::sources().into_iter().chain(estimate::sources()).chain(quantize::sources());
    let layers = elementwise::sources().into_iter().chain(column_sums::sources()).chain(adamw::sources());
    let models = transformer_sources().chain(decode::sources());
    weights.chain(scales).chain(layers).chain(models).chain(gemm::sources()).collect()
}
