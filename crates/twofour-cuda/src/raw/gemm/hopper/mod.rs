//! Families for Hopper, whose operands come by bulk tensor copies (TMA).

pub mod cluster;
mod shared;
pub mod tiled;
pub mod warp_pipelines;
