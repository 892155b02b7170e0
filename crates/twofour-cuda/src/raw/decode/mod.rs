//! What generating a few tokens at a time needs beside the GEMMs: [`crate::decode`] calls these kernels over length-checked memory.

pub(crate) mod attention;
pub(crate) mod choice;
pub(crate) mod embed;
pub(crate) mod gate;
pub(crate) mod norm;

use crate::source::{File, Source};

/// The scale of a row of 8-bit integers.
const ROW_SCALE: File = File::new("decode/row_scale.cuh", include_str!("row_scale.cuh"));

/// Returns every source.
pub(crate) fn sources() -> impl Iterator<Item = Source> {
    let tokens = norm::sources().into_iter().chain(gate::sources()).chain(embed::sources()).chain(choice::sources());
    attention::sources().into_iter().chain(tokens)
}
