//! One file for each command.

pub(crate) mod advise;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod compress;
pub(crate) mod convert;
mod converted;
pub(crate) mod decompress;
mod effect;
pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod kernels;
pub(crate) mod man;
pub(crate) mod merge;
pub(crate) mod model;
pub(crate) mod next;
pub(crate) mod output;
mod peft;
pub(crate) mod prune;
pub(crate) mod quantize;
pub(crate) mod quickstart;
pub(crate) mod sensitivity;
pub(crate) mod shrink;
pub(crate) mod tensor;
pub(crate) mod text;
pub(crate) mod train;
