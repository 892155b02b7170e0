//! The order in which products of many tokens take their tiles.

use super::GemmProblem;

/// As kernels have it (`panels.cuh`): tiles are taken panel after panel, so many tiles of features wide. Blocks that are at work together share what they read.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Panels {
    feature_tiles: u32,
    token_tiles: u32,
    width: u32,
}

impl Panels {
    /// Of a problem in tiles of so many features and tokens, and panels of so many features, or of one tile if that has more.
    pub(super) fn new(problem: GemmProblem, (features, tokens): (u32, u32), panel_features: u32) -> Self {
        Self {
            feature_tiles: problem.features.div_ceil(features as usize) as u32,
            token_tiles: problem.tokens.div_ceil(tokens as usize) as u32,
            width: (panel_features / features).max(1),
        }
    }

    /// How many tiles there are.
    pub(super) fn tiles(self) -> u32 {
        self.feature_tiles.saturating_mul(self.token_tiles)
    }
}
