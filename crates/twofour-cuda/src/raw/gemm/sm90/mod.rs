//! GEMM by `wgmma.sp` on sm_90a.

mod kernel;
mod plan;
mod shared;
mod source;
mod tile;

pub use kernel::{Sm90Kernel, Sm90Store};
pub(super) use plan::Sm90Plan;
pub(super) use shared::{SHARED_BYTES, shared_bytes_of_each};
pub use tile::Sm90Tile;

/// Consumer warpgroups.
const WARPGROUPS: u32 = 2;
