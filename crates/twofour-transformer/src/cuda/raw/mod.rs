//! Kernels over raw device pointers; the modules of [`crate::cuda`] call them over length-checked memory. Each kernel's
//! CUDA source is beside its module.

pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod decode;
pub(crate) mod embedding;
pub(crate) mod gated;
pub(crate) mod gradient_norm;
pub(crate) mod grid;
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

use twofour_cuda::{raw::float_types::FloatSource, source::Source};

/// The sources that are compiled for each type of floats.
const FLOAT_SOURCES: [FloatSource; 18] = [
    norm::SOURCE,
    cross_entropy::SOURCE,
    squared_error::SOURCE,
    embedding::SOURCE,
    keep_of_four::SOURCE,
    masking::SOURCE,
    grid::SOURCE,
    heads::SOURCE,
    softmax::SOURCE,
    image::grid::SOURCE,
    image::windows::SOURCE,
    gated::SOURCE,
    pointwise::SOURCE,
    weighted_rows::SOURCE,
    decode::norm::SOURCE,
    decode::gate::SOURCE,
    decode::embed::SOURCE,
    decode::choice::SOURCE,
];

/// Returns the source of every kernel.
pub(crate) fn sources() -> Vec<Source> {
    let steps = [gradient_norm::source(), sgd::source()];
    let attention = attention::sources().into_iter().chain(decode::attention::sources());
    let others = attention.chain(decode::dense::sources()).chain(steps);
    FLOAT_SOURCES.iter().flat_map(FloatSource::all).chain(others).collect()
}
