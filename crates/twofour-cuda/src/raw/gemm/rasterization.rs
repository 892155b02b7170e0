//! The tile scheduler of GEMMs of many tokens: tiles are ordered by rasterization.

use super::GemmProblem;
use crate::source::File;

/// The scheduler's code.
pub(super) const SOURCE: File = File::new("gemm/rasterization.cuh", include_str!("rasterization.cuh"));

/// The parameters of `rasterization.cuh`. Tiles are computed panel by panel; a panel is `width` tiles of features wide.
/// CTAs that run concurrently then share operands in L2.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Rasterization {
    feature_tiles: u32,
    token_tiles: u32,
    width: u32,
}

impl Rasterization {
    /// Returns the order of a problem in tiles of `features` by `tokens`. A panel is `panel_features` wide, or one
    /// tile if a tile is wider.
    pub(super) fn new(problem: GemmProblem, (features, tokens): (u32, u32), panel_features: u32) -> Self {
        Self {
            feature_tiles: problem.features.div_ceil(features as usize) as u32,
            token_tiles: problem.tokens.div_ceil(tokens as usize) as u32,
            width: (panel_features / features).max(1),
        }
    }

    /// Returns the number of tiles.
    pub(super) fn tiles(self) -> u32 {
        self.feature_tiles.saturating_mul(self.token_tiles)
    }
}
