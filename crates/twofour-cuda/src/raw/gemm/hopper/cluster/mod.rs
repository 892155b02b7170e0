//! GEMM of small batches by `wgmma.sp` on Hopper, by clusters with split-K. It reads every byte of the weight once and
//! is bound by HBM bandwidth. Kernels are named `stream`.

mod int4;
mod kernel;
mod plan;
mod shape;
mod tile;

use crate::source::File;

pub use kernel::StreamKernel;
use plan::RawProblem;
pub use shape::StreamShape;
use tile::Step;
pub use tile::StreamTile;

/// The parts that the kernels of both formats of weights share.
const STREAM: File = File::new("gemm/hopper/cluster/stream.cuh", include_str!("stream.cuh"));
