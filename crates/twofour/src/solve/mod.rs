//! Pruning that also changes the kept weights: **solvers**.
//!
//! [`sparsegpt`](mod@sparsegpt) prunes a layer so that its outputs change as little as possible on calibration inputs, and can quantize it in the same pass.

pub(crate) mod factor;
mod grid;
pub mod sparsegpt;

pub use grid::{Bits, Grid, GridScales, ScaleScope};
pub use sparsegpt::{Precision, Solved, SparseGpt, sparsegpt};
