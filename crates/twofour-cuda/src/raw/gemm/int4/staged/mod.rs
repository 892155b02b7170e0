//! GEMM with an int4 weight through `cp.async` pipelines in shared memory, on all architectures: for up to 64 tokens, and for fewer where
//! [`super::direct`] has no room for X.

use serde::{Deserialize, Serialize};

use super::{Int4Problem, UNIT};
use crate::Architecture;

/// Most tokens of each kernel.
const TOKENS: [u32; 4] = [8, 16, 32, 64];

/// Warps of a CTA.
pub(super) const WARPS: u32 = 8;

/// Most pipeline stages.
const MOST_STAGES: u32 = 8;

/// Bytes of a unit of int4 weights with a scale for every lane, and of the exchange of partial sums in a CTA.
const UNIT_BYTES: u32 = 32 * (16 + 8 + 4);
const EXCHANGE_BYTES: u32 = WARPS * 32 * 16;

/// Shared memory that a CTA may have on all architectures: that of sm_86 and sm_89.
const SHARED_BYTES: u32 = Architecture::SM_86.shared_bytes();

/// The division of the work among a CTA's warps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StagedShape {
    /// Most rows of X.
    pub tokens: u32,
    /// Warps that share the same rows of W: 1, 2, 4 or 8 of the CTA's eight, and at least `height`.
    pub k_warps: u32,
    /// Vertically adjacent units of 16 rows that a warp computes at a time: 1 or, up to 16 tokens, 2.
    pub height: u32,
}

impl StagedShape {
    /// Returns the shapes for a number of tokens. The list is empty for too many.
    pub fn all(tokens: usize) -> Vec<StagedShape> {
        let Some(tokens) = TOKENS.into_iter().find(|most| tokens <= *most as usize) else { return Vec::new() };
        let heights: &[u32] = if tokens <= 16 { &[2, 1] } else { &[1] };
        let of = |height: &u32| [1, 2, 4, 8].map(|k_warps| StagedShape { tokens, k_warps, height: *height });
        let is = |shape: &StagedShape| shape.k_warps >= shape.height && shape.stages() >= 2;
        heights.iter().flat_map(of).filter(is).collect()
    }

    /// Returns the shapes of all kernels.
    pub(super) fn every() -> Vec<StagedShape> {
        TOKENS.iter().flat_map(|tokens| StagedShape::all(*tokens as usize)).collect()
    }

    /// Returns the shape that best balances the work, as measured on an H200: the most rows to a CTA, and so the fewest reads of X, that leave CTAs
    /// for 70 % of the SMs.
    pub fn best(problem: Int4Problem, multiprocessors: u32) -> Option<StagedShape> {
        let all = StagedShape::all(problem.tokens);
        let enough = |shape: &&StagedShape| shape.blocks(problem.features) * 10 >= 7 * multiprocessors;
        all.iter().find(enough).or(all.last()).copied()
    }

    /// Returns the groups of rows. A CTA computes one group at a time.
    pub(super) fn blocks(self, features: usize) -> u32 {
        (features / UNIT.0).div_ceil((WARPS / self.k_warps * self.height) as usize) as u32
    }

    /// Returns the bytes of all warps' units of a stage.
    fn stage_bytes(self) -> u32 {
        WARPS * self.height * UNIT_BYTES
    }

    /// Returns the bytes of a chunk of X with `tokens` tokens.
    fn chunk_bytes(self, tokens: u32) -> u32 {
        tokens * (self.k_warps * UNIT.1 as u32 * 2 + 16)
    }

    /// Returns the stages that fit where X is streamed.
    fn stages(self) -> u32 {
        let stage = self.chunk_bytes(self.tokens) + self.stage_bytes();
        ((SHARED_BYTES - EXCHANGE_BYTES) / stage).min(MOST_STAGES)
    }

    /// Returns whether all of X stays in shared memory, and the bytes of shared memory.
    pub(super) fn shared(self, problem: Int4Problem) -> (bool, u32) {
        let chunk = u64::from(self.chunk_bytes(problem.tokens as u32));
        let chunks = problem.reduction.div_ceil(self.k_warps as usize * UNIT.1) as u64;
        let stages = u64::from(self.stages());
        let other = u64::from(EXCHANGE_BYTES) + stages * u64::from(self.stage_bytes());
        let resident = other + chunks * chunk <= u64::from(SHARED_BYTES);
        (resident, (other + if resident { chunks } else { stages } * chunk) as u32)
    }

    /// Returns the shape's name.
    pub(super) fn name(self) -> String {
        let StagedShape { tokens, k_warps, height } = self;
        format!("{tokens}k{k_warps}h{height}")
    }

    /// Returns the source's preprocessor definitions.
    pub(super) fn definitions(self) -> String {
        let StagedShape { tokens, k_warps, height } = self;
        let stages = self.stages();
        format!(
            "#define TOKENS {tokens}\n#define K_WARPS {k_warps}\n#define HEIGHT {height}\n#define STAGES {stages}\n"
        )
    }
}
