//! GEMM of small batches by `wgmma.sp` on sm_90a, by clusters with split-K. It reads every byte of the weight once and is bound by HBM bandwidth.

mod kernel;
mod plan;
mod shape;
mod tile;

pub use kernel::StreamKernel;
pub(super) use plan::{RawProblem, StreamPlan};
pub use shape::StreamShape;
pub(super) use tile::Step;
pub use tile::StreamTile;
