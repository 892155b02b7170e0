//! What generating a few tokens at a time needs beside the GEMMs: [`crate::cuda::decode`] calls these kernels over
//! length-checked memory.

pub(crate) mod attention;
pub(crate) mod choice;
pub(crate) mod dense;
pub(crate) mod embed;
pub(crate) mod gate;
pub(crate) mod norm;

use twofour_cuda::source::Source;

/// Returns every source.
pub(crate) fn sources() -> impl Iterator<Item = Source> {
    let tokens = norm::sources().into_iter().chain(gate::sources()).chain(embed::sources()).chain(choice::sources());
    attention::sources().into_iter().chain(tokens).chain(dense::sources())
}
