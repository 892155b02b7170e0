//! Kernels over raw device pointers; the modules of [`crate::cuda`] call them over length-checked memory. Each kernel's
//! CUDA source is beside its module.

pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod decode;
pub(crate) mod embedding;
pub(crate) mod gated;
pub(crate) mod gradient_norm;
pub(crate) mod heads;
pub(crate) mod image;
pub(crate) mod keep_of_four;
pub(crate) mod masking;
pub(crate) mod norm;
pub(crate) mod pointwise;
pub(crate) mod sgd;
pub(crate) mod softmax;
pub(crate) mod squared_error;
pub(crate) mod weighted_rows;

use twofour_cuda::source::Source;

/// Returns the source of every kernel.
pub(crate) fn sources() -> Vec<Source> {
    let losses = cross_entropy::sources().into_iter().chain(squared_error::sources());
    let rows = norm::sources().into_iter().chain(losses).chain(embedding::sources());
    let masks = keep_of_four::sources().into_iter().chain(masking::sources());
    let heads =
        heads::sources().into_iter().chain(softmax::sources()).chain(attention::sources()).chain(image::sources());
    let elements = gated::sources().into_iter().chain(pointwise::sources()).chain(weighted_rows::sources());
    let steps = [gradient_norm::source(), sgd::source()];
    rows.chain(masks).chain(heads).chain(elements).chain(steps).chain(decode::sources()).collect()
}
