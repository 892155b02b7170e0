//! Shapes, a tile and the CTAs of a cluster, and which of them compute a problem.

use serde::{Deserialize, Serialize};

use super::{
    kernel::TOKENS,
    tile::{ClusterTile, MAX_BLOCKS, Step},
};
use crate::{device::Launch, raw::gemm::hopper::shared::SHARED_BYTES};

/// A cluster's tile, and its CTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ClusterShape {
    /// Rows of W and of X.
    pub tile: ClusterTile,
    /// CTAs of the cluster: 1 to 8. They share the rows of W, and each accumulates a part of the columns.
    pub split: u32,
}

/// The fewest tokens of a tile where there are several tiles.
const MIN_TOKENS_OF_SEVERAL: u32 = 64;

/// Most tokens: beyond them the tiles of [`super::super::tiled`] are always as good.
const MAX_TOKENS: usize = 2048;

/// Most clusters: the rows of a grid.
const MAX_CLUSTERS: u32 = 65_535;

impl ClusterShape {
    /// Returns the shapes of tiles, whose rows of W `features_of` returns for each number of rows of X. Their rows of X
    /// are the fewest that hold all tokens; where that is 64 or more, or none holds them all, all such widths as
    /// several tiles. The list is empty where there are too many tokens. Every CTA has a step at least, and room for
    /// the accumulators that others send.
    pub(super) fn of(
        features_of: impl Fn(u32) -> &'static [u32],
        (features, tokens): (usize, usize),
        steps: u32,
        step: impl Fn(ClusterTile) -> Step,
    ) -> Vec<ClusterShape> {
        if tokens > MAX_TOKENS {
            return Vec::new();
        }
        let least = TOKENS.into_iter().find(|most| tokens <= *most as usize);
        let widths = TOKENS.into_iter().filter(|width| {
            Some(*width) == least || *width >= MIN_TOKENS_OF_SEVERAL && least.is_none_or(|least| *width <= least)
        });
        let tiles =
            widths.flat_map(|tokens| features_of(tokens).iter().map(move |&features| ClusterTile { features, tokens }));
        let tiles = tiles.filter(|tile| tile.clusters(features) * tile.tiles(tokens) <= MAX_CLUSTERS);
        let all = tiles.flat_map(|tile| (1..=steps.min(MAX_BLOCKS)).map(move |split| ClusterShape { tile, split }));
        all.filter(|shape| shape.tile.sums_bytes(shape.split) <= shape.tile.room_for_sums(step(shape.tile))).collect()
    }

    /// Returns the shape that best balances `features` rows over the SMs, or `None` if all leave too many SMs idle.
    pub(super) fn best(all: &[ClusterShape], features: usize, sms: u32) -> Option<ClusterShape> {
        // The smallest clusters whose CTAs occupy most of the device, and the fewest CTAs that read X.
        let enough = all.iter().filter(|shape| shape.blocks(features) * 10 >= sms * 7);
        enough.min_by_key(|shape| (shape.split, std::cmp::Reverse(shape.tile.features))).copied()
    }

    /// Returns the CTAs of all clusters.
    pub(super) fn blocks(self, features: usize) -> u32 {
        self.tile.clusters(features) * self.split
    }

    /// Returns the shape's name.
    pub(super) fn name(self) -> String {
        format!("{}s{}", self.tile.name(), self.split)
    }

    /// Returns the launch configuration for a shape of W and X.
    pub(super) fn launch_of(self, (features, tokens): (usize, usize), step: Step) -> Launch {
        let ClusterShape { tile, split } = self;
        let (block, shared) = (tile.threads(step), tile.shared_bytes(step));
        assert!(shared <= SHARED_BYTES, "{} needs {shared} bytes of shared memory", self.name());
        Launch { grid: (split, tile.clusters(features) * tile.tiles(tokens)), block, shared, cluster: split }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Architecture, DataType as Element,
        problem::GemmProblem,
        raw::gemm::{family::KernelFamily, hopper::cluster::kernel::step},
    };

    fn all(problem: GemmProblem) -> Vec<ClusterShape> {
        ClusterShape::methods(problem, Architecture::SM_90)
    }

    #[test]
    fn every_cluster_has_room_for_buffers_and_for_the_sums_that_others_send() {
        for tokens in TOKENS {
            for element in [Element::BF16, Element::E4M3, Element::I8] {
                let shapes = all(GemmProblem::plain(element, Element::F32, 4096, tokens as usize, 14_336));
                for ClusterShape { tile, split } in &shapes {
                    let step = step(element, *tile);
                    assert!(tile.stages(step) >= 3 && tile.shared_bytes(step) <= SHARED_BYTES, "{tile:?}");
                    assert!(tile.sums_bytes(*split) <= tile.room_for_sums(step), "{tile:?} {split}");
                    assert!(tile.blocks() == 1 || 2 * tile.shared_bytes(step) <= SHARED_BYTES, "{tile:?}");
                }
                // The fastest clusters of small layers, as measured.
                for split in [1, 2] {
                    assert!(
                        shapes.contains(&ClusterShape { tile: ClusterTile { features: 64, tokens }, split }),
                        "{tokens} {split}"
                    );
                }
            }
        }
    }

    #[test]
    fn more_clusters_than_a_grid_has_rows_are_not_asked_for() {
        let shapes = |features| all(GemmProblem::plain(Element::BF16, Element::BF16, features, 8, 4096));
        assert!(shapes(1 << 22).iter().all(|shape| shape.tile.features > 64));
        assert!(shapes(65_535 * 64).iter().any(|shape| shape.tile.features == 64));
        assert!(shapes(1 << 28).is_empty());
    }
}
