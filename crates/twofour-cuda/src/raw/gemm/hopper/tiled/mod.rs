//! GEMM by `wgmma.sp` on Hopper, in a grid of tiles. Kernels are named `gemm-sm90`.

mod cost;
mod kernel;
mod plan;
mod shared;
mod source;
mod tile;

pub use kernel::{HopperKernel, HopperStore};
pub use tile::HopperTile;

/// Consumer warpgroups.
const WARPGROUPS: u32 = 2;
