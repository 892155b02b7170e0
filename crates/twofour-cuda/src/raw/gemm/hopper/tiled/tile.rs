//! The tiles of the kernels, and which of them compute a problem.

use serde::{Deserialize, Serialize};

use super::{HopperKernel, HopperStore, WARPGROUPS, shared};
use crate::{
    DataType as Element,
    problem::{GemmProblem, XOrder},
    raw::gemm::hopper::shared::SHARED_BYTES,
};

/// A tile of the result, and the CTAs that compute it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HopperTile {
    /// Rows of W: 128 or 256.
    pub features: u32,
    /// Rows of X: a multiple of 8, of 16 for i8, at most 256.
    pub tokens: u32,
    /// Pipeline stages between TMA and the tensor cores.
    pub stages: u32,
    /// Columns of X in a stage, in units of 128 bytes: 1 or 2.
    pub atoms: u32,
    /// CTAs of a cluster that share rows of X by multicast: 1 or 2.
    pub cluster: u32,
    /// CTAs of a cluster that divide the reduction (split-K); `None` for a kernel without split-K.
    pub split: Option<u32>,
}

/// Tokens of a TMA box where X is `[reduction, tokens]`, or where results are `[features, tokens]`.
pub(super) const PIECE_TOKENS: u32 = 64;

const fn tile(features: u32, tokens: u32, stages: u32, cluster: u32) -> HopperTile {
    HopperTile { features, tokens, stages, atoms: 1, cluster, split: None }
}

/// Tiles for 16-bit elements and 8-bit floats: persistent kernels whose accumulators fill the registers.
const FLOAT_TILES: [HopperTile; 5] =
    [tile(256, 200, 4, 2), tile(256, 192, 4, 2), tile(128, 256, 5, 2), tile(128, 256, 5, 1), tile(128, 200, 5, 2)];

/// Tiles for i8, whose instructions take multiples of 16 tokens.
const I8_TILES: [HopperTile; 4] =
    [tile(256, 192, 4, 2), tile(128, 256, 5, 2), tile(128, 256, 5, 1), tile(128, 208, 5, 2)];

/// Rows of W and of X of the tiles with split-K, for every element type.
const SPLIT_TILES: [(u32, u32); 11] = [
    (256, 192),
    (256, 160),
    (256, 144),
    (256, 128),
    (256, 96),
    (128, 208),
    (128, 192),
    (128, 160),
    (128, 128),
    (128, 96),
    (128, 64),
];

/// Rows of W and of X, and whether the kernel has split-K, of the only tiles whose W and X have different 8-bit float
/// types or whose results TMA accumulates: one for many tokens and one for small batches.
const RARE_TILES: [(u32, u32, bool); 2] = [(256, 192, false), (128, 128, true)];

/// Most CTAs of a cluster.
const MAX_CTAS: u32 = 8;

/// Split-K factors.
const SPLITS: [u32; 6] = [1, 2, 3, 4, 6, 8];

impl HopperTile {
    /// Returns the tiles of the persistent kernels for an element type.
    fn persistent(element: Element) -> &'static [HopperTile] {
        if element == Element::I8 { &I8_TILES } else { &FLOAT_TILES }
    }

    /// Returns the tiles with split-K for an element type, with every cluster.
    fn split_all(element: Element) -> impl Iterator<Item = HopperTile> {
        let clusters = [1, 2].into_iter().flat_map(|cluster| SPLITS.map(|split| (cluster, split)));
        let clusters = clusters.filter(|(cluster, split)| cluster * split <= MAX_CTAS);
        SPLIT_TILES.into_iter().flat_map(move |(features, tokens)| {
            // Shared memory left for stages beside the smallest chunk of results.
            let room = SHARED_BYTES
                - shared::ALIGNMENT
                - shared::RECEIVED_BARRIER
                - WARPGROUPS * (shared::staging_bytes(16) + shared::accumulator_bytes(16));
            // Two atoms of columns to a stage where three such stages fit.
            let stages = |atoms| room / shared::stage_bytes(element, features, tokens, atoms);
            let (atoms, stages) = if stages(2) >= 3 { (2, stages(2)) } else { (1, stages(1)) };
            let split =
                move |(cluster, split)| HopperTile { features, tokens, stages, atoms, cluster, split: Some(split) };
            clusters.clone().map(split)
        })
    }

    /// Returns the CTAs that divide the reduction.
    pub(super) fn parts(self) -> u32 {
        self.split.unwrap_or(1)
    }

    /// Returns the tiles that can compute a problem.
    pub(super) fn all(problem: GemmProblem) -> Vec<HopperTile> {
        let store = HopperStore::of(problem);
        let atoms = HopperKernel::atoms(problem);
        let fits = |tile: &HopperTile| {
            (problem.x == XOrder::TokensFirst && store != HopperStore::MnMajor
                || tile.tokens.is_multiple_of(PIECE_TOKENS))
                && tile.parts() <= atoms.div_ceil(tile.atoms)
                && HopperKernel::of(problem, *tile).has_room_for(tile.parts())
        };
        if problem.is_mixed() || HopperKernel::adds_by_tma(problem) {
            let all =
                HopperTile::persistent(problem.element).iter().copied().chain(HopperTile::split_all(problem.element));
            return all.filter(|tile| RARE_TILES.contains(&tile.size())).filter(fits).collect();
        }
        let mut persistent: Vec<HopperTile> =
            HopperTile::persistent(problem.element).iter().copied().filter(fits).collect();
        // Storing elements one at a time is slow with any tile, so there are only one tile for many tokens and one for
        // small batches.
        let split = HopperTile::split_all(problem.element).filter(fits);
        if store == HopperStore::OneByOne {
            persistent.truncate(1);
            return persistent
                .into_iter()
                .chain(split.filter(|tile| (tile.features, tile.tokens) == (128, 128)))
                .collect();
        }
        persistent.into_iter().chain(split).collect()
    }

    /// Returns the rows of W and of X, and whether the kernel has split-K.
    fn size(self) -> (u32, u32, bool) {
        (self.features, self.tokens, self.split.is_some())
    }

    pub(super) fn name(self) -> String {
        let HopperTile { features, tokens, stages, cluster, split, .. } = self;
        let split = split.map_or(String::new(), |split| format!("s{split}"));
        format!("{features}x{tokens}x{stages}c{cluster}{split}")
    }
}
