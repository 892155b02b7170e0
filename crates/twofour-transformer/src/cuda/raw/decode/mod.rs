//! What generating a few tokens at a time needs beside the GEMMs: [`crate::cuda::decode`] calls these kernels over
//! length-checked memory.

pub(crate) mod attention;
pub(crate) mod choice;
pub(crate) mod dense;
pub(crate) mod embed;
pub(crate) mod gate;
pub(crate) mod norm;
