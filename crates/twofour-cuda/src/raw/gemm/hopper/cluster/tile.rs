//! A cluster's tile: registers, stages and shared memory of its CTAs.

use serde::{Deserialize, Serialize};

use crate::raw::gemm::hopper::shared::shared_bytes_of_each;

/// The tile of the result that a cluster computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ClusterTile {
    /// Rows of W, a multiple of 16.
    pub features: u32,
    /// Most rows of X: 8, 16, 32, 64, 96 or 128.
    pub tokens: u32,
}

/// The shared memory and the rows of a CTA's step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// Bytes of a stage.
    pub(super) bytes: u32,
    /// The largest prefetch distance, in steps.
    pub(super) most_ahead: u32,
    /// Rows of W that a warpgroup computes, in units of 64: 1 or 2.
    pub(super) height: u32,
}

/// Most CTAs of a cluster.
pub(super) const MAX_BLOCKS: u32 = 8;

/// The fewest stages of a tile of 128 rows that reserves room for the accumulators of a cluster of seven.
const ENOUGH_STAGES: u32 = 6;

/// Bytes to align the start of shared memory, and of the barrier that counts received accumulators.
const OTHER_BYTES: u32 = 1024 + 8;

impl ClusterTile {
    /// Returns the tile's name.
    pub(super) fn name(self) -> String {
        format!("{}x{}", self.features, self.tokens)
    }

    /// Returns the clusters for `features` rows of W.
    pub(super) fn clusters(self, features: usize) -> u32 {
        features.div_ceil(self.features as usize) as u32
    }

    /// Returns the tiles for `tokens` tokens.
    pub(super) fn tiles(self, tokens: usize) -> u32 {
        tokens.div_ceil(self.tokens as usize) as u32
    }

    /// Returns the rows of X of each tile.
    pub(super) fn x_rows(self, tokens: usize) -> u32 {
        tokens.div_ceil(self.tiles(tokens) as usize).next_multiple_of(8) as u32
    }

    /// Returns the consumer warpgroups.
    fn groups(self, step: Step) -> u32 {
        self.features.div_ceil(64 * step.height)
    }

    /// Returns whether producer warps release registers to consumers (`setmaxnreg`): where there are several consumer
    /// warpgroups with large accumulators.
    fn gives(self, step: Step) -> bool {
        step.height * self.tokens >= 128 && self.groups(step) > 1
    }

    /// Returns the registers of a consumer thread where producers release some: those that a launch allocates for all
    /// threads of the CTA, less 24 for each producer thread.
    fn taken(self, step: Step) -> u32 {
        let groups = self.groups(step);
        let launched = 65_536 / self.threads(step) / 8 * 8;
        ((launched * (groups + 1) - 24) / groups / 8 * 8).min(240)
    }

    /// Returns the threads of a CTA: the consumer warpgroups, and one more for the producer warps.
    pub(super) fn threads(self, step: Step) -> u32 {
        (self.groups(step) + 1) * 128
    }

    /// Returns the bytes of the accumulators that one of `split` CTAs receives from the others.
    pub(super) fn sums_bytes(self, split: u32) -> u32 {
        (self.features / 16).div_ceil(split) * (split - 1) * 16 * self.tokens * 4
    }

    /// Returns the CTAs resident on an SM: two where tiles are small in both directions.
    pub(super) fn blocks(self) -> u32 {
        if self.features > 128 || self.tokens >= 64 { 1 } else { 2 }
    }

    /// Returns the bytes for stages and received accumulators.
    fn room(self) -> u32 {
        shared_bytes_of_each(self.blocks()) - OTHER_BYTES
    }

    /// Returns the pipeline stages: as many as fit beside the accumulators that a cluster receives. Tiles of 64 rows
    /// reserve room for clusters of two, and tiles of 128 rows for clusters of seven where enough stages are left;
    /// measurements of layers showed these clusters to be the fastest.
    pub(super) fn stages(self, step: Step) -> u32 {
        let beside = |split| ((self.room() - self.sums_bytes(split)) / (step.bytes + 16)).min(step.most_ahead);
        match self.features {
            64 => beside(2),
            128 if beside(7) >= ENOUGH_STAGES => beside(7),
            _ => beside(1),
        }
    }

    /// Returns the bytes left for received accumulators beside the stages, at most as many as a cluster needs.
    pub(super) fn room_for_sums(self, step: Step) -> u32 {
        let left = self.room() - self.stages(step) * (step.bytes + 16);
        (1..=MAX_BLOCKS).map(|split| self.sums_bytes(split)).filter(|bytes| *bytes <= left).max().unwrap_or(0)
    }

    pub(super) fn shared_bytes(self, step: Step) -> u32 {
        OTHER_BYTES + self.stages(step) * (step.bytes + 16) + self.room_for_sums(step)
    }

    /// Returns the sources' preprocessor definitions.
    pub(super) fn definitions(self, step: Step) -> String {
        let ClusterTile { features, tokens } = self;
        let (stages, shared, threads) = (self.stages(step), self.shared_bytes(step), self.threads(step));
        let (sums, gives, blocks) = (self.room_for_sums(step), u32::from(self.gives(step)), self.blocks());
        let taken = self.taken(step);
        format!(
            "#define FEATURES {features}\n#define TOKENS {tokens}\n#define HEIGHT {}\n#define THREADS {threads}\n\
             #define GIVES {gives}\n#define TAKEN {taken}\n#define BLOCKS {blocks}\n#define STAGES {stages}\n#define \
             SUMS_BYTES {sums}\n#define SHARED_BYTES_ASKED {shared}\n",
            step.height
        )
    }
}
