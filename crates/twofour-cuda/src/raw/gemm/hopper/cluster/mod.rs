//! GEMM of small batches by `wgmma.sp` on Hopper, by clusters with split-K. It reads every byte of the weight once and
//! is bound by HBM bandwidth. Kernels keep the name `stream`, by which bench/results has them.

mod int4;
mod kernel;
mod plan;
mod shape;
mod tile;

use crate::source::File;

pub use kernel::ClusterKernel;
use plan::RawProblem;
pub use shape::ClusterShape;
pub use tile::ClusterTile;
use tile::Step;

/// The parts that the kernels of both formats of weights share.
const CLUSTER: File = File::new("gemm/hopper/cluster/cluster.cuh", include_str!("cluster.cuh"));
