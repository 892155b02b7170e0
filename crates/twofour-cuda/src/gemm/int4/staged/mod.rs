//! Weights that pass through shared memory: for up to 64 tokens, and for fewer where X does not fit beside them.

use serde::{Deserialize, Serialize};

use super::{Int4Problem, UNIT};
use crate::Architecture;

/// Tokens that there are kernels for.
const TOKENS: [u32; 4] = [8, 16, 32, 64];

/// Warps of a block.
pub(super) const WARPS: u32 = 8;

/// Most units that a warp holds and has asked for.
const MOST_STAGES: u32 = 8;

/// Bytes of a unit of four-bit weights with a scale for every lane, and of where a block's warps exchange sums.
const UNIT_BYTES: u32 = 32 * (16 + 8 + 4);
const EXCHANGE_BYTES: u32 = WARPS * 32 * 16;

/// Shared memory that a block may have on all architectures: that of sm_86 and sm_89.
const SHARED_BYTES: u32 = Architecture::SM_86.shared_bytes();

/// How the warps of a block share the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StagedShape {
    /// Rows of X that there is room for.
    pub tokens: u32,
    /// Warps that share the same rows of W: 1, 2, 4 or 8 of the block's eight, and no fewer than the units.
    pub k_warps: u32,
    /// Units of 16 rows that a warp takes at a time: 1 or, up to 16 tokens, 2.
    pub height: u32,
}

impl StagedShape {
    /// Those for so many tokens: none where there are too many.
    pub fn all(tokens: usize) -> Vec<StagedShape> {
        let Some(tokens) = TOKENS.into_iter().find(|most| tokens <= *most as usize) else { return Vec::new() };
        let heights: &[u32] = if tokens <= 16 { &[2, 1] } else { &[1] };
        let of = |height: &u32| [1, 2, 4, 8].map(|k_warps| StagedShape { tokens, k_warps, height: *height });
        let is = |shape: &StagedShape| shape.k_warps >= shape.height && shape.stages() >= 2;
        heights.iter().flat_map(of).filter(is).collect()
    }

    /// Every one.
    pub(super) fn every() -> Vec<StagedShape> {
        TOKENS.iter().flat_map(|tokens| StagedShape::all(*tokens as usize)).collect()
    }

    /// The one that spreads the work best, as measured on an H200: the most rows to a block, and so the least of X to be read, that leave blocks for
    /// seven of ten multiprocessors.
    pub fn best(problem: Int4Problem, multiprocessors: u32) -> Option<StagedShape> {
        let all = StagedShape::all(problem.tokens);
        let enough = |shape: &&StagedShape| shape.blocks(problem.features) * 10 >= 7 * multiprocessors;
        all.iter().find(enough).or(all.last()).copied()
    }

    /// Groups of rows, each of which a block takes at a time.
    pub(super) fn blocks(self, features: usize) -> u32 {
        (features / UNIT.0).div_ceil((WARPS / self.k_warps * self.height) as usize) as u32
    }

    /// Bytes of all warps' units of a stage.
    fn stage_bytes(self) -> u32 {
        WARPS * self.height * UNIT_BYTES
    }

    /// Bytes of a chunk of X with so many tokens.
    fn chunk_bytes(self, tokens: u32) -> u32 {
        tokens * (self.k_warps * UNIT.1 as u32 * 2 + 16)
    }

    /// Stages that there is room for where X passes through.
    fn stages(self) -> u32 {
        let stage = self.chunk_bytes(self.tokens) + self.stage_bytes();
        ((SHARED_BYTES - EXCHANGE_BYTES) / stage).min(MOST_STAGES)
    }

    /// Whether all of X stays in shared memory, and how much of it that takes.
    pub(super) fn shared(self, problem: Int4Problem) -> (bool, u32) {
        let chunk = u64::from(self.chunk_bytes(problem.tokens as u32));
        let chunks = problem.reduction.div_ceil(self.k_warps as usize * UNIT.1) as u64;
        let stages = u64::from(self.stages());
        let other = u64::from(EXCHANGE_BYTES) + stages * u64::from(self.stage_bytes());
        let resident = other + chunks * chunk <= u64::from(SHARED_BYTES);
        (resident, (other + if resident { chunks } else { stages } * chunk) as u32)
    }

    /// Its name.
    pub(super) fn name(self) -> String {
        let StagedShape { tokens, k_warps, height } = self;
        format!("{tokens}k{k_warps}h{height}")
    }

    /// What the source is defined for.
    pub(super) fn definitions(self) -> String {
        let StagedShape { tokens, k_warps, height } = self;
        let stages = self.stages();
        format!(
            "#define TOKENS {tokens}\n#define K_WARPS {k_warps}\n#define HEIGHT {height}\n#define STAGES {stages}\n"
        )
    }
}
