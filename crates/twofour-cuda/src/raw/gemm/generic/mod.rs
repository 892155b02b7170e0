//! Families by `mma.sp`, for every architecture from sm_80 on.

pub mod direct;
pub mod staged;
pub mod tiled;
